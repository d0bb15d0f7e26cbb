"""CUDA C++ kernels: the .cu files beside the kernels, compiled by NVRTC.

What a file includes from the same folder (`#include "mma.cuh"`) is put in its place before it is
compiled, so it needs no include path. CuPy keeps the binaries on disk, keyed by source, options,
architecture and compiler version: a key that a changed header changes too.
"""

import contextlib
import functools
import hashlib
import re
import tempfile
from pathlib import Path

from xtrain.cuda.compile import cubins

FOLDER = Path(__file__).parents[1] / "kernels"
OPTIONS = ("--std=c++17",)
INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


def files() -> list[str]:
    """Names of all CUDA C++ sources."""
    return sorted(path.name for path in FOLDER.glob("*.cu"))


def text(name: str) -> str:
    """The source of a file in the kernels' folder, with what it includes from there."""
    return _with_included(name, set())


def _with_included(name: str, included: set[str]) -> str:
    """Compilers' messages still name the file and line that were written."""
    source = (FOLDER / name).read_text()

    def body(found: re.Match) -> str:
        if found[1] in included:
            return ""
        included.add(found[1])
        after = source.count("\n", 0, found.start()) + 2
        return f'#line 1 "{found[1]}"\n{_with_included(found[1], included)}#line {after} "{name}"'

    return INCLUDE.sub(body, source)


@functools.cache
def module(name: str, defines: tuple[str, ...] = ()):
    """The compiled module of a file as a CuPy RawModule; `defines` are NAME=VALUE texts."""
    import cupy

    options = OPTIONS + tuple(f"-D{define}" for define in defines)
    return cupy.RawModule(code=text(name), options=options, backend="nvrtc")


@functools.cache
def function(name: str, entry: str, defines: tuple[str, ...] = ()):
    """A kernel of a file; call it as function(grid, block, args)."""
    return module(name, defines).get_function(entry)


@functools.cache
def function_of(architecture: str, name: str, entry: str, defines: tuple[str, ...] = ()):
    """As `function`, for an architecture that CuPy does not ask for, such as `sm_90a`."""
    import cupy

    path = _kept(architecture, name, defines)
    if path is not None:
        return cupy.RawModule(path=str(path)).get_function(entry)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin(name, architecture, defines))
        file.flush()
        return cupy.RawModule(path=file.name).get_function(entry)


def _kept(architecture: str, name: str, defines: tuple[str, ...]) -> Path | None:
    """The machine code's file beside those of Numba's kernels; None where none can be written."""
    from cupy.cuda import nvrtc

    parts = (text(name), OPTIONS, defines, architecture, nvrtc.getVersion())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    path = cubins.FOLDER / f"{name}-{key}.cubin"
    if not path.exists():
        machine_code = cubin(name, architecture, defines)
        with contextlib.suppress(OSError):
            cubins.write(path, machine_code)
    return path if path.exists() else None


def cubin(name: str, architecture: str, defines: tuple[str, ...] = ()) -> bytes:
    """Machine code for `sm_80`, `sm_90a`, ...; needs the NVRTC and runtime wheels, no driver."""
    return _compiled(name, architecture, defines)[0]


def report(name: str, architecture: str, defines: tuple[str, ...] = ()) -> str:
    """What the assembler says of registers, spills and serialized products."""
    return _compiled(name, architecture, defines, "--ptxas-options=-v")[1]


def _compiled(name: str, architecture: str, defines, *more: str) -> tuple[bytes, str]:
    """Machine code and the compiler's messages."""
    from cupy.cuda import nvrtc

    options = [*OPTIONS, *more, *(f"-D{define}" for define in defines)]
    options += [f"--gpu-architecture={architecture}", *_include_options()]
    program = nvrtc.createProgram(text(name), name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as problem:
        raise RuntimeError(f"{name}: {problem}\n{nvrtc.getProgramLog(program)}") from None
    finally:
        nvrtc.destroyProgram(program)


def _include_options() -> list[str]:
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    return [] if folder is None else [f"-I{folder}"]
