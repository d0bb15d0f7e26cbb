"""Which documents are used, and which of them are held out.

Both are pure functions of the documents and the configuration, never of a run's seed or batch.

Order: by a hash of a seed and the text, so a slice has the mixture of the whole (the centuries of
a chronological corpus, say) and a longer slice begins with the shorter one.

Held out is every n-th document, n = 1 / fraction, until `limit` tokens are reached; with fewer
than n documents, the last `fraction` of the token stream. So a longer prefix of the same documents
keeps what was held out: runs on 10 and on 11 files share their evaluation set as soon as the limit
is reached within the files of both.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np

from xtrain.data.order import by_hash

# Until it is known that there are as many, 1 / fraction documents are held.
LEAST_AND_MOST_HELD_OUT = (1e-4, 0.5)


def choose(
    documents: Iterable[str],
    *,
    order_seed: int | None = None,
    max_bytes: int | None = None,
    scratch: Path | None = None,
) -> tuple[Iterator[str], int | None]:
    """Return the non-empty documents in hashed order, whole ones up to `max_bytes` of UTF-8.

    order_seed None leaves them in their order and streams them; otherwise all are read at once, in
    bounded memory with the rest in files in `scratch` (see `order`). Of a first document larger
    than max_bytes its head is taken. Also returns how many bytes of text come at most (None:
    unknown).
    """
    texts = (text for text in documents if text)
    total = max_bytes
    if order_seed is not None:
        texts, found = by_hash(texts, order_seed, scratch)
        total = found if max_bytes is None else min(found, max_bytes)
    return texts if max_bytes is None else _slice(texts, max_bytes), total


def utf8_bytes(text: str) -> int:
    """Return how many bytes `text` is in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def hold_out(
    encoded: Iterator[np.ndarray], fraction: float, *, limit: int | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (0 for training or 1 for held out, ids) for each document of token ids."""
    every = round(1 / fraction)
    first = list(islice(encoded, every))
    if len(first) < every:
        yield from _hold_out_tail(first, fraction, limit)
        return
    heldout = 0
    for index, ids in enumerate(chain(first, encoded)):
        out = index % every == every - 1 and (limit is None or heldout < limit)
        heldout += len(ids) if out else 0
        yield int(out), ids


def leave_out_tail(encoded: Iterable[np.ndarray], tokens: int) -> Iterator[np.ndarray]:
    """Yield the documents of token ids but for the last ones, which hold at least `tokens`."""
    kept: deque[np.ndarray] = deque()
    held = 0
    for ids in encoded:
        kept.append(ids)
        held += len(ids)
        while held - len(kept[0]) >= tokens:
            held -= len(kept[0])
            yield kept.popleft()


def _slice(texts: Iterable[str], max_bytes: int) -> Iterator[str]:
    used = 0
    for text in texts:
        size = utf8_bytes(text)
        if used + size > max_bytes:
            if used == 0:
                yield text.encode()[:max_bytes].decode("utf-8", errors="ignore")
            return
        used += size
        yield text


def _hold_out_tail(
    encoded: list[np.ndarray], fraction: float, limit: int | None
) -> Iterator[tuple[int, np.ndarray]]:
    total = sum(len(ids) for ids in encoded)
    tail = math.ceil(total * fraction)
    left = total - min(tail, limit or tail)  # tokens still to go to training
    for ids in encoded:
        cut = min(left, len(ids))
        left -= cut
        for part, piece in enumerate((ids[:cut], ids[cut:])):
            if len(piece):
                yield part, piece
