"""CUDA C++ kernels: the .cu files beside the kernels, compiled by NVRTC.

CuPy keeps the binaries on disk, keyed by source, options, architecture and compiler version.
"""

import functools
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "kernels"
OPTIONS = ("--std=c++17",)


def files() -> list[str]:
    """Names of all CUDA C++ sources."""
    return sorted(path.name for path in FOLDER.glob("*.cu"))


def text(name: str) -> str:
    """The source of a file in the kernels' folder."""
    return (FOLDER / name).read_text()


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


def cubin(name: str, capability: tuple[int, int], defines: tuple[str, ...] = ()) -> bytes:
    """Machine code for a compute capability; needs the NVRTC and runtime wheels, but no driver."""
    from cupy.cuda import nvrtc

    options = [*OPTIONS, *(f"-D{define}" for define in defines)]
    options += [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", *_include_options()]
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
