"""Machine code of Numba kernels on disk, so that a process compiles only what is new.

Files lie in ~/.cache/xtrain/kernels, named by a hash of everything that the code depends on: the
sources of this package, the kernel's constants, the architecture and the compilers' versions. A
folder that cannot be written costs compile time (about half a second a kernel), nothing else.
"""

import contextlib
import functools
import hashlib
import os
import tempfile
from pathlib import Path
from types import CellType

from xtrain.cuda import runtime
from xtrain.engine import scalar

FOLDER = Path.home() / ".cache" / "xtrain" / "kernels"


def kept(kernel, capability: tuple[int, int]) -> bytes:
    """The kernel's cubin for a compute capability, from disk or compiled and put there."""
    path = FOLDER / f"{kernel.name}-{_key(kernel, capability)}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        machine_code = kernel.cubin(capability)
    with contextlib.suppress(OSError):
        write(path, machine_code)
    return machine_code


def write(path: Path, machine_code: bytes) -> None:
    """Put a file in its place, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(machine_code)
    os.replace(file.name, path)  # readers see all of it or nothing


def _key(kernel, capability) -> str:
    parts = (
        _sources(),
        kernel.block,
        kernel.resident,
        str(kernel.signature),
        str(capability),
        _identity(kernel.fn, set()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@functools.cache
def _sources() -> str:
    """Hash of this package's sources, the formulas it compiles, and the compilers' versions."""
    total = hashlib.sha256(repr(sorted(runtime.versions().items())).encode())
    for path in [*sorted(Path(__file__).parents[1].rglob("*.py")), Path(scalar.__file__)]:
        total.update(path.read_bytes())
    return total.hexdigest()


def _identity(value, seen: set[int]) -> object:
    """What a closure stands for: its code's name and, recursively, the constants it holds."""
    value = value.cell_contents if isinstance(value, CellType) else value
    fn = getattr(value, "py_func", value)
    if not callable(fn) or not hasattr(fn, "__closure__"):
        return repr(value)
    if id(fn) in seen:
        return fn.__qualname__
    seen.add(id(fn))
    cells = [_identity(cell, seen) for cell in fn.__closure__ or ()]
    return fn.__module__, fn.__qualname__, cells
