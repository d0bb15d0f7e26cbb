"""The GPT-2 byte-pair encoding, from the rank table that the package ships; no network.

Text is ordinary: `<|endoftext|>` written in a document is encoded as its characters, never as the
end-of-text id. That id is placed between documents by whoever packs them.

Encoding computes nothing of its own (tiktoken does it) but splits long texts for the threads. A
split stands where a non-space is followed by a space: every alternative of the GPT-2 pattern ends
there and none looks back, so the pieces give the same ids as the whole.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import tiktoken

from xtrain.data.tokenizers.encoded import Encoded, in_threads
from xtrain.errors import UsageError

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 50256
VOCAB_SIZE = 50257

_RANKS_PATH = Path(__file__).parent / "assets" / "gpt2.tiktoken"
_RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# GPT-2's published pattern. Possessive quantifiers keep it linear on long runs of one class.
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
# ASCII only: a space to this expression is a space to the pattern above, too.
_SPLIT = re.compile(r"(?<=[!-~])(?=[ \n])")
_PIECE_CHARS = 1 << 18


class Tokenizer:
    """GPT-2 BPE: `vocab_size` ids, `eot` the end-of-text id, `fingerprint` a sha256 in hex."""

    vocab_size = VOCAB_SIZE
    eot = END_OF_TEXT_ID

    def __init__(self, ranks: dict[bytes, int]) -> None:
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: END_OF_TEXT_ID},
            explicit_n_vocab=VOCAB_SIZE,
        )
        facts = f"{_RANKS_SHA256}\n{_PATTERN}\n{END_OF_TEXT}={END_OF_TEXT_ID}"
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()
        self._token_bytes = np.zeros(VOCAB_SIZE, np.uint8)  # the longest has 128
        for token, rank in ranks.items():
            self._token_bytes[rank] = len(token)

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens in it are ordinary text."""
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str], *, workers: int = 0) -> list[np.ndarray]:
        """Return one uint32 array of ids a text, encoded by `workers` threads (0: one a core)."""
        pieces = [list(_pieces(text)) for text in texts]
        flat = [piece for row in pieces for piece in row]
        encoded = iter(in_threads(self._encode, flat, workers))
        return [_join([next(encoded) for _ in row]) for row in pieces]

    def encode_documents(self, texts: Sequence[str], *, workers: int = 0) -> list[Encoded]:
        """Return each text with the end-of-text id behind it, which stands for no byte."""
        end = np.array([END_OF_TEXT_ID], np.uint32)
        ended = (np.append(ids, end) for ids in self.encode_batch(texts, workers=workers))
        return [Encoded(ids, self._token_bytes.take(ids)) for ids in ended]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Raises ValueError if an id is outside the vocabulary.
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < VOCAB_SIZE:
                raise ValueError(f"token id {i} is outside the vocabulary of {VOCAB_SIZE}")
        return self._encoding.decode(ids, errors="replace")

    def special_id(self, name: str) -> int | None:
        """The id of a special token, None if there is none of that name."""
        return END_OF_TEXT_ID if name == END_OF_TEXT else None

    def _encode(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())


@lru_cache(maxsize=1)
def load_gpt2() -> Tokenizer:
    """Return the GPT-2 tokenizer, built once a process. UsageError if its table is damaged."""
    return Tokenizer(gpt2_ranks())


def gpt2_ranks() -> dict[bytes, int]:
    """Return the shipped table: bytes of a token to its rank, which is its id."""
    return _read_ranks(_RANKS_PATH)


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: the GPT-2 rank table is missing; reinstall xtrain") from error
    digest = hashlib.sha256(raw).hexdigest()
    if digest != _RANKS_SHA256:
        raise UsageError(
            f"{path}: the GPT-2 rank table is damaged (sha256 {digest[:12]}..., expected "
            f"{_RANKS_SHA256[:12]}...); reinstall xtrain"
        )
    rows = (line.split() for line in raw.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in rows}


def _pieces(text: str) -> Iterable[str]:
    start = 0
    while len(text) - start > _PIECE_CHARS:
        cut = _SPLIT.search(text, start + _PIECE_CHARS)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
