"""T1: every backend compiles and launches a kernel.

Claim   The same vector sum, bit for bit, from Numba on the CPU, Numba-CUDA in the simulator and on
        a GPU, CuPy and NVRTC; without a driver, and without the compiler of kernels, one line says
        what is missing, with exit code 2.
Why     A half-installed toolchain otherwise shows first as a traceback deep inside a training step.
Reads   Nothing.
Needs   A CPU; the last three values one CUDA device. About 4 seconds.
"""

import tempfile
from pathlib import Path
from unittest import mock

import numba
import numpy as np

from gates.instruments.child import run_python
from gates.instruments.simulated import simulated, spoilt
from gates.judging.gate import Defect, Gate

N = 1_003  # no multiple of any block size
WITHOUT_COMPILER = """
import sys, types
from importlib.machinery import ModuleSpec
sys.modules["cupy"] = types.ModuleType("cupy")
sys.modules["cupy"].__spec__ = ModuleSpec("cupy", None)
sys.modules["numba_cuda"] = None
from pipelines.__main__ import main
sys.exit(main(["device=cuda"]))
"""


@numba.njit
def add_on_cpu(a, b, out):
    for i in range(out.size):
        out[i] = a[i] + b[i]


def on_cpu(device: str) -> dict[str, float]:
    a, b = _vectors()
    out = np.full(N, np.nan, np.float32)
    add_on_cpu(a, b, out)
    return {"vector_add_numba_cpu": _worst(out)}


def in_simulator(device: str) -> dict[str, float]:
    return {"vector_add_simulator": float(simulated("vector_add")["differing"])}


def on_gpu(device: str) -> dict[str, float]:
    """The three toolchains of a GPU; nothing on a CPU."""
    if device != "cuda":
        return {}
    import cupy

    from xtrain.cuda.kernels import vector_add

    a, b = (cupy.asarray(v) for v in _vectors())
    sums = {
        "vector_add_numba_cuda": vector_add.add(cupy, a, b),
        "vector_add_cupy": a + b,
        "vector_add_nvrtc": vector_add.add_nvrtc(cupy, a, b),
    }
    return {name: _worst(cupy.asnumpy(c)) for name, c in sums.items()}


def without_driver(device: str) -> dict[str, float]:
    """Lines on stderr of `device=cuda` when no GPU is to be seen, of which one is right."""
    lines = _refusal("-m", "pipelines", "device=cuda", CUDA_VISIBLE_DEVICES="")
    return {"missing_driver_line": float(len(lines))}


def without_compiler(device: str) -> dict[str, float]:
    """The same where CuPy is installed and numba-cuda, which compiles the kernels, is not."""
    lines = _refusal("-c", WITHOUT_COMPILER)
    named = any("numba-cuda is not installed" in line for line in lines)
    return {"missing_compiler_line": float(len(lines) if named else 0)}


def _refusal(*arguments: str, **environment: str) -> list[str]:
    """The lines on stderr of a command that refuses and writes nothing; none if it does not."""
    with tempfile.TemporaryDirectory() as folder:
        result = run_python(*arguments, cwd=Path(folder), **environment)
        left = list(Path(folder).iterdir())
    refused = result.returncode == 2 and not result.stdout and not left
    return result.stderr.splitlines() if refused else []


def _vectors() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((2, N)).astype(np.float32)


def _worst(c: np.ndarray) -> float:
    """Largest absolute error; NaN where nothing was written."""
    a, b = _vectors()
    return float(np.abs(c.astype(np.float64) - (a + b)).max())


def _leaves_the_last_element(a, b, out):
    out[:-1] = a[:-1] + b[:-1]


def _forgets_the_tail_of_a_block():
    return mock.patch.dict(globals(), add_on_cpu=_leaves_the_last_element)


def _chatters_before_the_line():
    """Messages of an import before the one line, as a library's warnings would be."""
    return mock.patch.dict("os.environ", PYTHONPROFILEIMPORTTIME="1")


def _another_program_in_the_simulator():
    return spoilt("simulated_kernels.vector_add.add = lambda xp, a, b: a.copy()")


GATE = Gate(
    "T1",
    "Toolchain",
    measures=(on_cpu, in_simulator, on_gpu, without_driver, without_compiler),
    defects=(
        Defect("last element", "vector_add_numba_cpu", on_cpu, _forgets_the_tail_of_a_block),
        Defect("no sum", "vector_add_simulator", in_simulator, _another_program_in_the_simulator),
        Defect("chatter", "missing_driver_line", without_driver, _chatters_before_the_line),
        Defect("chatter", "missing_compiler_line", without_compiler, _chatters_before_the_line),
    ),
)
