"""A document as token ids, with the bytes of text that each id stands for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from xtrain.errors import UsageError

# Characters handed to a thread at once: a hand-over costs as much as encoding 500.
_CHUNK_CHARS = 1 << 16
Made = TypeVar("Made")


class UnreadableText(UsageError):
    """A tokenizer failed on a text; `text` is that text, which may be looked for in its source."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


@dataclass(frozen=True, slots=True)
class Encoded:
    """ids: (n,) uint32, the end-of-text id last. sizes: (n,) integers, UTF-8 bytes of the text.

    The sizes of a whole document sum to the bytes of its text as it was, whatever the tokenizer
    makes of it; of a slice they say which bytes are its own.
    """

    ids: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Encoded:
        return Encoded(self.ids[part], self.sizes[part])

    @property
    def text_bytes(self) -> int:
        return int(self.sizes.sum(dtype=np.int64))


def in_threads(function: Callable[[str], Made], texts: Sequence[str], workers: int) -> list[Made]:
    """Return function(text) for each text, by `workers` threads (0: one a core)."""
    if workers == 1:  # tiktoken's expressions are faster in the thread that used them first
        return [function(text) for text in texts]
    # Threads, not processes: both libraries release the interpreter lock while they encode.
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        made = pool.map(lambda chunk: [function(text) for text in chunk], _chunks(texts))
        return [each for chunk in made for each in chunk]


def _chunks(texts: Sequence[str]) -> list[list[str]]:
    chunks: list[list[str]] = [[]]
    chars = 0
    for text in texts:
        if chars >= _CHUNK_CHARS:
            chunks.append([])
            chars = 0
        chunks[-1].append(text)
        chars += len(text)
    return chunks
