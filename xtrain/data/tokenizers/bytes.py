"""One token a UTF-8 byte, for models so small that a vocabulary of words would be most of them.

Ids 0 to 255 are bytes, then the end-of-text id and the two that frame a turn of a conversation.
`tokenizer=bytes` names it; its files are those of a byte-level encoding without merges.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from xtrain.data.tokenizers.encoded import Encoded
from xtrain.data.tokenizers.gpt2 import END_OF_TEXT
from xtrain.data.tokenizers.hf_files import added_token, byte_letters, write_files

NAME = "bytes"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SPECIAL = {END_OF_TEXT: 256, TURN_START: 257, TURN_END: 258}


class ByteTokenizer:
    """`vocab_size` ids, `eot` the end-of-text id, `fingerprint` a sha256 in hex."""

    vocab_size = 256 + len(SPECIAL)
    eot = SPECIAL[END_OF_TEXT]
    fingerprint = hashlib.sha256(json.dumps(SPECIAL).encode()).hexdigest()

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens in it are ordinary text."""
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str], *, workers: int = 0) -> list[np.ndarray]:
        """Return one uint32 array of ids a text."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; special tokens are shown, bytes that are no UTF-8 are U+FFFD.

        Raises ValueError if an id is outside the vocabulary.
        """
        shown = {number: name.encode() for name, number in SPECIAL.items()}
        parts = []
        for i in map(int, ids):
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} is outside the vocabulary of {self.vocab_size}")
            parts.append(shown.get(i) or bytes([i]))
        return b"".join(parts).decode("utf-8", errors="replace")

    def encode_documents(self, texts: Sequence[str], *, workers: int = 0) -> list[Encoded]:
        """Return each text with the end-of-text id behind it, which stands for no byte."""
        ended = [np.append(ids, np.uint32(self.eot)) for ids in self.encode_batch(texts)]
        return [Encoded(ids, (ids < 256).astype(np.uint8)) for ids in ended]

    def special_id(self, name: str) -> int | None:
        """The id of a special token, None if there is none of that name."""
        return SPECIAL.get(name)


def write_byte_tokenizer(directory: str | Path, **config: str) -> list[Path]:
    """Write its tokenizer.json and tokenizer_config.json, with further entries of the latter."""
    letters = byte_letters()
    vocab = {letters[b]: b for b in range(256)} | SPECIAL
    added = [added_token(name, number) for name, number in SPECIAL.items()]
    return write_files(directory, vocab=vocab, merges=[], added=added, config=config)
