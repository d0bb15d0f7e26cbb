"""Documents in the order of a keyed hash, in bounded memory: sorted runs on disk, merged.

    key of a document = blake2b(its UTF-8 bytes, key = the seed's 8 bytes), 64 bytes, ascending

Up to RUN_BYTES of text are held (with 256 bytes of bookkeeping for each document) and sorted; what
is more goes to temporary files without a name, which the system removes with the process. FAN files
of one size are merged into one of the next: sizes up to 64 MB, 4 GB, 256 GB, 16 TB, so no more than
SIZES * FAN readers of READ_BYTES are ever open. A document is held whole, whatever its size.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

RUN_BYTES = 1 << 26
FAN = 64
SIZES = 4
READ_BYTES = 1 << 16
# What is held at most, beside the largest document: 80 MiB.
HELD_BYTES = RUN_BYTES + SIZES * FAN * READ_BYTES

_RECORD = struct.Struct("<64sQ")
_BOOKKEEPING = 256

Record = tuple[bytes, bytes]  # key, UTF-8 text


def by_hash(
    texts: Iterable[str], seed: int, scratch: Path | None = None
) -> tuple[Iterator[str], int]:
    """Return the texts in the order of their keys, and their UTF-8 bytes in all.

    All are read before this returns. scratch: an existing directory for what does not fit into
    memory. None: the system's.
    """
    salt = seed.to_bytes(8, "little")
    held: list[Record] = []
    sizes: list[list[BinaryIO]] = []  # sizes[n]: runs of RUN_BYTES * FAN**n
    held_bytes = total = 0
    for text in texts:
        raw = text.encode()
        held.append((hashlib.blake2b(raw, key=salt).digest(), raw))
        total += len(raw)
        held_bytes += len(raw) + _BOOKKEEPING
        if held_bytes >= RUN_BYTES:
            held.sort()
            _put(sizes, 0, _written(held, scratch), scratch)
            held, held_bytes = [], 0
    held.sort()
    runs = [_read(run) for same in sizes for run in same]
    ordered = heapq.merge(held, *runs) if runs else iter(held)
    return (raw.decode() for _, raw in ordered), total


def _put(sizes: list[list[BinaryIO]], size: int, run: BinaryIO, scratch: Path | None) -> None:
    if size == len(sizes):
        sizes.append([])
    sizes[size].append(run)
    if len(sizes[size]) == FAN:
        merged = _written(heapq.merge(*map(_read, sizes[size])), scratch)
        sizes[size] = []
        _put(sizes, size + 1, merged, scratch)


def _written(records: Iterable[Record], scratch: Path | None) -> BinaryIO:
    run = tempfile.TemporaryFile(dir=scratch, buffering=READ_BYTES)  # noqa: SIM115  _read closes it
    for key, raw in records:
        run.write(_RECORD.pack(key, len(raw)))
        run.write(raw)
    run.seek(0)
    return run


def _read(run: BinaryIO) -> Iterator[Record]:
    with run:
        while head := run.read(_RECORD.size):
            key, size = _RECORD.unpack(head)
            yield key, run.read(size)
