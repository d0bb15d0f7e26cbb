"""Token shards: one file that holds a stream of token ids and where its documents start.

    header    256 bytes, little-endian (`_HEADER`), the last 32 a sha256 of those before
    tokens    N ids, uint16 if the vocabulary fits and uint32 otherwise
    padding   zeros up to a multiple of 8
    offsets   uint64 (documents + 1,): document d is tokens[offsets[d] : offsets[d + 1]]

The header names the sha256 of everything behind it. A shard is written to a temporary file beside
its place, synced and renamed, so its name never stands for half a shard. Opening maps the file;
its size, header and offsets are always checked, the payload's sha256 and that its ids are of the
vocabulary on the first open of a file in a process (about 1 GB/s: 12 s for the 6 billion tokens of
the largest run, once in hours). Pages that are damaged after that are not noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from array import array
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np

from xtrain.disk import sync
from xtrain.errors import UsageError

VERSION = 1

_MAGIC = b"XTSHARD\n"
# magic, version, bytes a token, vocabulary, tokens, documents, payload sha256, tokenizer sha256
_HEADER = struct.Struct("<8sIIQQQ32s32s120x")
_HEADER_BYTES = 256
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Shard:
    """An open shard; the arrays are read-only views of the mapped file.

    tokens: (N,) uint16 or uint32. offsets: (documents + 1,) uint64, first 0, last N, ascending.
    sha256: of the payload, hex. tokenizer: fingerprint of the tokenizer that made the ids.
    """

    path: Path
    tokens: np.ndarray
    offsets: np.ndarray
    vocab_size: int
    sha256: str
    tokenizer: str

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def fingerprint(self) -> str:
        """Identity of the content: equal for equal ids, documents, vocabulary and tokenizer."""
        facts = f"{self.sha256} {self.vocab_size} {self.tokenizer}"
        return hashlib.sha256(facts.encode()).hexdigest()


class ShardWriter:
    """Write a shard document by document; it takes its name when the `with` block ends well.

    On an exception the temporary file is removed and nothing appears at `path`.
    """

    def __init__(self, path: str | Path, *, vocab_size: int, tokenizer: str) -> None:
        self.path = Path(path)
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.tokens = 0
        self._dtype = _dtype(vocab_size)
        self._offsets = array("Q", [0])
        self._hash = hashlib.sha256()

    def __enter__(self) -> Self:
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._file = open(self._temporary, "wb")
        self._file.write(bytes(_HEADER_BYTES))
        return self

    @property
    def documents(self) -> int:
        return len(self._offsets) - 1

    @property
    def sha256(self) -> str:
        """Of the payload, hex; final after the `with` block."""
        return self._hash.hexdigest()

    def append(self, ids: np.ndarray) -> None:
        """Add one document of integer `ids` (n,), n > 0, each inside the vocabulary."""
        unsigned = ids.dtype.kind == "u"
        assert len(ids) > 0 and (unsigned or ids.min() >= 0), self.path
        assert ids.max() < self.vocab_size, self.path
        self._write(np.ascontiguousarray(ids, self._dtype).data)
        self.tokens += len(ids)
        self._offsets.append(self.tokens)

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            with contextlib.suppress(OSError):  # of a full disk: what it still held is dropped
                self._file.close()
            self._temporary.unlink(missing_ok=True)

    def _write(self, data) -> None:
        self._hash.update(data)
        self._file.write(data)

    def _finish(self) -> None:
        self._write(bytes(-self.tokens * self._dtype.itemsize % 8))
        self._write(np.asarray(self._offsets, "<u8").data)
        self._file.seek(0)
        self._file.write(self._header())
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self.path)
        sync(self.path.parent)

    def _header(self) -> bytes:
        fields = _HEADER.pack(
            _MAGIC,
            VERSION,
            self._dtype.itemsize,
            self.vocab_size,
            self.tokens,
            self.documents,
            self._hash.digest(),
            bytes.fromhex(self.tokenizer),
        )
        return fields + hashlib.sha256(fields).digest()


def open_shard(
    path: str | Path,
    *,
    vocab_size: int | None = None,
    tokenizer: str | None = None,
    verify: bool = False,
) -> Shard:
    """Map a shard and check it; see the module for what is checked when.

    vocab_size, tokenizer: what the caller's model and tokenizer have; another one is an error.
    verify: hash the payload again even if this process has done so before.
    Raises UsageError, which names the file and what is wrong with it.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER_BYTES)
            status = os.fstat(file.fileno())
    except OSError as error:
        raise UsageError(f"{path}: cannot open the token shard: {error.strerror}") from error
    itemsize, vocab, tokens, documents, digest, made_by = _parse(path, header)
    offsets_at = _HEADER_BYTES + tokens * itemsize + -tokens * itemsize % 8
    expected = offsets_at + 8 * (documents + 1)
    if status.st_size != expected:
        what = "truncated" if status.st_size < expected else "too long"
        _refuse(path, f"token shard {what}: {status.st_size} bytes, expected {expected}")
    if vocab_size not in (None, vocab):
        _refuse(path, f"token shard for a vocabulary of {vocab}, not {vocab_size}", remedy="")
    if tokenizer not in (None, made_by):
        _refuse(path, f"token shard of tokenizer {made_by[:12]}, not {tokenizer[:12]}", remedy="")
    if verify:
        _payload.cache_clear()
    file_id = (status.st_ino, status.st_size, status.st_mtime_ns)
    found, largest = _payload(path.resolve(), _dtype(vocab), tokens, *file_id)
    if found != digest:
        _refuse(path, f"token shard damaged: payload sha256 {found[:12]}, not {digest[:12]}")
    if largest >= vocab:
        _refuse(path, f"token shard damaged: id {largest} in a vocabulary of {vocab}")
    if not _are_bounds(np.memmap(path, np.dtype("<u8"), "r", offsets_at, (documents + 1,)), tokens):
        _refuse(path, "token shard damaged: its documents do not follow each other")
    return Shard(
        path=path,
        tokens=np.memmap(path, _dtype(vocab), "r", _HEADER_BYTES, (tokens,)),
        offsets=np.memmap(path, np.dtype("<u8"), "r", offsets_at, (documents + 1,)),
        vocab_size=vocab,
        sha256=digest,
        tokenizer=made_by,
    )


def _parse(path: Path, header: bytes) -> tuple[int, int, int, int, str, str]:
    if header[: len(_MAGIC)] != _MAGIC:
        _refuse(path, "not a token shard (its first bytes are foreign)", remedy="")
    if len(header) < _HEADER_BYTES:
        _refuse(path, f"token shard truncated: {len(header)} bytes, fewer than its header")
    fields = header[: _HEADER.size]
    _, version, itemsize, vocab, tokens, documents, digest, made_by = _HEADER.unpack(fields)
    # Before the checksum: another version may put it elsewhere.
    if version != VERSION:
        _refuse(path, f"token shard of version {version}, expected {VERSION}")
    if hashlib.sha256(fields).digest() != header[_HEADER.size :]:
        _refuse(path, "token shard damaged: the header does not match its checksum")
    if vocab > 1 << 32 or itemsize != _dtype(vocab).itemsize:
        _refuse(path, f"token shard damaged: {itemsize} bytes a token for a vocabulary of {vocab}")
    if tokens == 0:
        _refuse(path, "token shard without tokens", remedy="")
    return itemsize, vocab, tokens, documents, digest.hex(), made_by.hex()


def _refuse(path: Path, problem: str, remedy: str = "; delete its directory, prepare again"):
    raise UsageError(f"{path}: {problem}{remedy}")


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@lru_cache(maxsize=64)
def _payload(
    path: Path, dtype: np.dtype, tokens: int, inode: int, size: int, mtime_ns: int
) -> tuple[str, int]:
    """sha256 and largest id; the last three arguments are what a cached answer stands for."""
    digest, largest, left = hashlib.sha256(), 0, tokens * dtype.itemsize
    with open(path, "rb") as file:
        file.seek(_HEADER_BYTES)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            ids = np.frombuffer(chunk[:left], dtype)
            largest = max(largest, int(ids.max(initial=0)))
            left -= ids.nbytes
    return digest.hexdigest(), largest


def _are_bounds(offsets: np.ndarray, tokens: int) -> bool:
    """Whether documents cover the tokens from the first to the last, each with one or more."""
    if offsets[0] != 0 or offsets[-1] != tokens:
        return False
    for at in range(0, len(offsets) - 1, _CHUNK_BYTES):
        part = offsets[at : at + _CHUNK_BYTES + 1]
        if not (part[1:] > part[:-1]).all():
            return False
    return True
