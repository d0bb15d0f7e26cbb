"""CUDA C++ kernels: the .cu files beside the kernels, compiled by NVRTC.

What a file includes from the same folder (`#include "mma.cuh"`) is put in its place before it is
compiled, so it needs no include path. CuPy keeps the binaries on disk, keyed by source, options,
architecture and compiler version: a key that a changed header changes too.
"""

import functools
import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "kernels"
OPTIONS = ("--std=c++17",)
INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


def files() -> list[str]:
    """Names of all CUDA C++ sources."""
    return sorted(path.name for path in FOLDER.glob("*.cu"))


def text(name: str) -> str:
    """The source of a file in the kernels' folder, with what it includes from there."""
    return _with_included((FOLDER / name).read_text(), name)


def _with_included(source: str, name: str) -> str:
    """Compilers' messages still name the file and line that were written."""
    included = set()

    def body(found: re.Match) -> str:
        if found[1] in included:
            return ""
        included.add(found[1])
        after = source.count("\n", 0, found.start()) + 2
        return f'#line 1 "{found[1]}"\n{(FOLDER / found[1]).read_text()}#line {after} "{name}"'

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


def cubin(name: str, architecture: str, defines: tuple[str, ...] = ()) -> bytes:
    """Machine code for `sm_80`, `sm_90a`, ...; needs the NVRTC and runtime wheels, no driver."""
    from cupy.cuda import nvrtc

    options = [*OPTIONS, *(f"-D{define}" for define in defines)]
    options += [f"--gpu-architecture={architecture}", *_include_options()]
    program = nvrtc.createProgram(text(name), name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as problem:
        raise RuntimeError(f"{name}: {problem}\n{nvrtc.getProgramLog(program)}") from None
    finally:
        nvrtc.destroyProgram(program)


def _include_options() -> list[str]:
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    return [] if folder is None else [f"-I{folder}"]
