"""Cut a token stream into fixed windows: shuffled without end to train, in order to evaluate.

    window w   tokens[w T : w T + T + 1], its inputs the first T and its targets the last T
    n          (N - 1) // T windows; a rest shorter than T at the end of the stream is not trained
    step s     global window numbers s A B ... (s + 1) A B - 1
    number g   epoch g // n, window permutation(seed, epoch)[g % n]

So a batch is a pure function of (seed, step), resuming needs no state, and the windows left over
when an epoch ends begin the next step: each window comes exactly once an epoch. Changing the batch
or the accumulation keeps the order of the windows.

With respect_documents a target across a boundary (the one after an end-of-text id) is -100 and
"starts" says where the document of each position begins in its row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from xtrain.data.shards import Shard
from xtrain.errors import UsageError

IGNORED = -100

Batch = dict[str, np.ndarray]


class PackedWindows:
    """A training source.

    steps_per_epoch: steps until each window has been seen (the last of them may begin the next
    epoch). fingerprint: sha256 of the shard and of all that decides the batches.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        seed: int,
        batch_size: int,
        seq_len: int,
        accumulation: int = 1,
        respect_documents: bool = False,
    ) -> None:
        """Raise UsageError if a size is not positive or the shard has not one whole window."""
        sizes = {"batch_size": batch_size, "seq_len": seq_len, "accumulation": accumulation}
        _check_positive(sizes)
        self.windows = (len(shard.tokens) - 1) // seq_len
        if self.windows < 1:
            raise UsageError(
                f"train.seq_len={seq_len}: longer than the training data, {len(shard.tokens)} "
                f"tokens; use at most {len(shard.tokens) - 1}, or more text"
            )
        self._shard = shard
        self._seed = seed
        self._shape = (accumulation, batch_size, seq_len)
        self._respect_documents = respect_documents
        self._windows_per_step = accumulation * batch_size
        self.steps_per_epoch = -(-self.windows // self._windows_per_step)
        facts = f"{shard.fingerprint} {seed} {self._shape} {respect_documents}"
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()

    def batch(self, step: int) -> Batch:
        """Return int32 "input_ids", "targets" and, respecting documents, "starts": (A, B, T)."""
        first = step * self._windows_per_step
        numbers = range(first, first + self._windows_per_step)
        chosen = [
            int(
                permutation(self._seed, number // self.windows, self.windows)[number % self.windows]
            )
            for number in numbers
        ]
        rows = _cut(self._shard, chosen, self._shape[-1], self._respect_documents)
        return {key: value.reshape(self._shape) for key, value in rows.items()}

    def epoch(self, step: int) -> float:
        """Return how many epochs are done before `step`."""
        return step * self._windows_per_step / self.windows


class EvalWindows:
    """An evaluation source: the first `max_tokens` targets of a shard, the same for any batch.

    tokens: how many targets that is. fingerprint: sha256 of the shard and of the windows.
    """

    def __init__(
        self,
        shard: Shard,
        *,
        seq_len: int,
        max_tokens: int | None = None,
        respect_documents: bool = False,
    ) -> None:
        """Raise UsageError if a size is not positive or the shard has no target."""
        _check_positive({"seq_len": seq_len} | ({"eval_tokens": max_tokens} if max_tokens else {}))
        targets = len(shard.tokens) - 1
        if targets < 1:
            raise UsageError(f"{shard.path}: {len(shard.tokens)} token is too few to evaluate on")
        self.tokens = min(targets, max_tokens or targets)
        self._shard = shard
        self._seq_len = seq_len
        self._respect_documents = respect_documents
        facts = f"{shard.fingerprint} {seq_len} {self.tokens} {respect_documents}"
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield int32 (B, T) batches in stream order; what pads the last has targets -100."""
        _check_positive({"batch_size": batch_size})
        seq_len = self._seq_len
        windows = -(-self.tokens // seq_len)
        for first in range(0, windows, batch_size):
            chosen = range(first, first + batch_size)
            rows = _cut(self._shard, chosen, seq_len, self._respect_documents)
            at = np.array(chosen)[:, None] * seq_len + np.arange(seq_len)  # (B, T)
            rows["targets"][at >= self.tokens] = IGNORED
            yield rows


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return the order of `n` windows in an epoch, (n,) int64, read-only.

    The windows sorted by the raw 64-bit output of Philox keyed (seed, epoch): its stream is fixed
    by its definition, while NumPy's own shuffles may change between versions.
    """
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(n)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order


def _cut(shard: Shard, windows, seq_len: int, respect_documents: bool) -> Batch:
    """Return the rows of `windows` (R, T); past the end of the shard, id 0 and target -100."""
    total = len(shard.tokens)
    inputs = np.zeros((len(windows), seq_len), np.int32)
    targets = np.full((len(windows), seq_len), IGNORED, np.int32)
    for row, window in enumerate(windows):
        start = window * seq_len
        stream = shard.tokens[start : start + seq_len + 1]
        inputs[row, : min(len(stream), seq_len)] = stream[:seq_len]
        targets[row, : max(len(stream) - 1, 0)] = stream[1:]
    if not respect_documents:
        return {"input_ids": inputs, "targets": targets}
    first = np.array(windows, np.int64)[:, None] * seq_len  # (R, 1)
    at = np.minimum(
        first + np.arange(seq_len + 1), total
    )  # (R, T + 1); padding is its own document
    # Index of the document that begins last at or before each position.
    document = np.searchsorted(shard.offsets, at.astype(shard.offsets.dtype), side="right") - 1
    targets[document[:, 1:] != document[:, :-1]] = IGNORED
    begins = shard.offsets[document[:, :-1]].astype(np.int64)
    starts = np.maximum(begins - first, 0).astype(np.int32)
    return {"input_ids": inputs, "targets": targets, "starts": starts}


def _check_positive(sizes: dict[str, int]) -> None:
    for key, value in sizes.items():
        if value < 1:
            raise UsageError(f"train.{key}={value}: use 1 or more")
