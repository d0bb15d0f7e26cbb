"""safetensors files, written and read a piece at a time: there is never a second copy of a model.

    8 bytes, the header's length | header: {name: {dtype, shape, data_offsets}} | data

The bytes of a file are those that safetensors itself writes; it checks the header of one that is
read. A piece is at most PIECE_BYTES of a tensor, whatever the model's size: what writing and
reading take on the host, and reading on the device, beyond the tensors themselves.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open

from xtrain.engine.dtype import bfloat16

PIECE_BYTES = 64 << 20
# As safetensors names them, in the order in which it writes them: the widest first.
DTYPES = {"I64": np.int64, "F32": np.float32, "BF16": bfloat16, "F16": np.float16}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its dtype as safetensors names it, its shape, where its bytes begin."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def pieces(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Its elements in order: (where they lie in the flat tensor, a host array of them)."""
        dtype = np.dtype(DTYPES[self.dtype])
        with open(self.path, "rb") as file:
            file.seek(self.start)
            for part in parts(self.size, dtype.itemsize):
                count = part.stop - part.start
                read = file.read(count * dtype.itemsize)
                if len(read) != count * dtype.itemsize:
                    raise OSError(f"{self.path} ends early")
                yield part, np.frombuffer(read, dtype)


def parts(size: int, itemsize: int) -> Iterator[slice]:
    """A flat array of so many elements, cut into pieces."""
    step = PIECE_BYTES // itemsize
    return (slice(at, min(at + step, size)) for at in range(0, size, step))


def write_tensors(
    path: Path,
    tensors: Mapping[str, object],
    host: Callable[[object], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write contiguous arrays of a device, which `host` copies to the host, as one file."""
    named = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    order = list(DTYPES)
    dtypes = {name: named[np.dtype(array.dtype)] for name, array in tensors.items()}
    names = sorted(tensors, key=lambda name: (order.index(dtypes[name]), name))
    header, at = {"__metadata__": dict(metadata)} if metadata else {}, 0
    for name in names:
        shape, end = list(tensors[name].shape), at + tensors[name].nbytes
        header[name] = {"dtype": dtypes[name], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            flat = flat_view(tensors[name])
            for part in parts(flat.size, flat.dtype.itemsize):
                file.write(np.ascontiguousarray(host(flat[part])).view(np.uint8))


def read_header(path: Path) -> dict[str, Stored]:
    """What a file holds, by name. Raises SafetensorError or OSError when it is no such file."""
    with safe_open(path, framework="np"):
        pass  # it checks that the tensors fill the file, each with the bytes of its shape
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: Stored(
            path, each["dtype"], tuple(each["shape"]), 8 + length + each["data_offsets"][0]
        )
        for name, each in header.items()
    }


def put(stored: Stored, view, array: Callable[[np.ndarray], object]) -> None:
    """Copy a tensor of a file into a contiguous fp32 view of its shape; `array` copies a piece to
    the view's device."""
    flat = flat_view(view)
    for part, piece in stored.pieces():
        flat[part] = array(piece.astype(np.float32, copy=False))


def has_bits_of(stored: Stored, view, host: Callable[[object], np.ndarray]) -> bool:
    """Whether a tensor of a file is a contiguous view of a device, bit for bit."""
    if stored.shape != view.shape or DTYPES.get(stored.dtype) != view.dtype:
        return False
    flat = flat_view(view)
    return all(host(flat[part]).tobytes() == piece.tobytes() for part, piece in stored.pieces())


def flat_view(array):
    """The array as one row, without a copy."""
    assert array.flags.c_contiguous, "tensors are written from and read into contiguous arrays"
    return array.reshape(-1)
