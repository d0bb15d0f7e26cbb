"""Where arrays live and which kernels run: which backend runs is chosen here, lazily.

A device gives its array module (`xp`: NumPy or CuPy), moves arrays, and captures a step. Kernels
plug themselves into the ops when their package is imported (`xtrain.cpu`, `xtrain.cuda`), so the
engine never imports them at load time.
"""

import gc
import importlib
import importlib.util
import os
import resource
import sys
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xtrain.engine import debug
from xtrain.engine.dtype import bfloat16, float64
from xtrain.errors import UsageError

NAMES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class MemoryUse:
    """allocations: requests to the driver so far.  reserved_bytes: held now, by all pools.

    peak_bytes: the most that was held at once. On a CPU both are the process's, without requests.
    """

    allocations: int
    reserved_bytes: int
    peak_bytes: int


class Device:
    """The CPU. A subclass in `xtrain.cuda` overrides what differs on a GPU.

    foreign: numbers of the dtypes that its kernels do not take. float64 exists only to check
    gradients; Numba's CPU compiler has no bf16.
    """

    name = "cpu"
    xp = np
    foreign = frozenset({float64.num, bfloat16.num})

    def __init__(self) -> None:
        # Per-op implementation choices that are not the default, e.g. {"linear": "tiled"}.
        self.variants: dict[str, str] = {}
        self.op_sync = False  # whether the host waits for every op; the CPU has nothing to wait for
        # Read here, once: every op asks, and reading the environment takes microseconds.
        self.reference_only = debug.use_reference_only()
        self.check_values = debug.check_values()

    def configure(self, *, op_sync: bool, pool: bool, capture: bool) -> None:
        """Take the choices of a phase that only a GPU has; the CPU has none of them to make."""

    def array(self, host: np.ndarray) -> np.ndarray:
        """Copy a host array to the device."""
        return np.array(host)

    def flat(self, size: int, dtype) -> np.ndarray:
        """A zeroed 1-D array whose address is a multiple of 64 bytes, so vector loads are whole."""
        itemsize = np.dtype(dtype).itemsize
        raw = np.zeros(size * itemsize + 64, np.uint8)
        skip = -raw.ctypes.data % 64
        return raw[skip : skip + size * itemsize].view(dtype)

    def write(self, array, host: np.ndarray) -> None:
        """Copy a host array into a device array of its shape and dtype, which stays in place."""
        array[...] = host

    def host(self, array) -> np.ndarray:
        """Copy a device array to the host; the only sanctioned read."""
        return np.asarray(array)

    def memory(self) -> MemoryUse:
        """What is held now and what was held at most."""
        return _process_memory()

    def peak_of(self, action: Callable[[], object]) -> int:
        """Bytes held at the fullest moment of `action`, beyond what was held before it.

        On a CPU what NumPy and Python allocated; slow, because each allocation is followed.
        """
        self.release_unused()
        tracemalloc.start()
        try:
            action()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def free_bytes(self) -> int:
        """Memory that nothing holds and no file is cached in."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def restart_peak(self) -> None:
        """Give unused memory back; the peak of a process is counted from its start all the same."""
        self.release_unused()

    def other_processes(self) -> int:
        """How many other processes use the device as theirs alone; nobody does so with a CPU."""
        return 0

    def release_unused(self) -> None:
        """Give memory that no array uses back to the system."""
        gc.collect()  # a training step and its captured form refer to each other

    def synchronize(self) -> None:
        """Wait until all queued work is done; nothing is ever queued on the CPU."""

    def capture(self, step: Callable, inputs: Callable[[], dict] | None = None) -> Callable:
        """Return a callable that replays `step`; on the CPU that is `step` itself.

        inputs: gives the arrays that the step reads, by name, so that a replay can tell which one
        was replaced since the step was captured.
        """
        return step


_local = threading.local()


def _process_memory() -> MemoryUse:
    """Of this process. Not `ru_maxrss` on Linux: a child begins there with what its parent held."""
    if sys.platform != "linux":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = peak if sys.platform == "darwin" else 1024 * peak
        return MemoryUse(0, peak, peak)
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    held, peak = (1024 * int(kilobytes[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return MemoryUse(0, held, peak)


def resolve(name: str) -> str:
    """Turn `auto`, `cpu` or `cuda` into the backend to use.

    Raises UsageError in one line when `cuda` is asked for and there is no usable GPU.
    """
    if name not in NAMES:
        raise UsageError(f"device={name}: choose one of {', '.join(NAMES)}")
    if name == "cpu":
        return "cpu"
    reason = _why_no_cuda()
    if reason is None:
        return "cuda"
    if name == "auto":
        return "cpu"
    raise UsageError(f"device=cuda: {reason}; use device=cpu or device=auto")


def _why_no_cuda() -> str | None:
    if importlib.util.find_spec("xtrain.cuda.runtime") is None:
        return "this build of xtrain has no CUDA engine"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (pip install 'xtrain[cuda12]' or 'xtrain[cuda13]')"
    return importlib.import_module("xtrain.cuda.runtime").why_unusable()


def use(name: str) -> Device:
    """Make a backend current for this thread, loading its kernels, and return its device."""
    backend = resolve(name)
    if backend == "cuda":
        device = importlib.import_module("xtrain.cuda").make_device()
    else:
        if not debug.use_reference_only():
            importlib.import_module("xtrain.cpu")
        device = Device()
    _local.device = device
    return device


def current() -> Device:
    """The current device of this thread; the CPU unless `use` said otherwise."""
    try:  # every op asks: half the time of asking whether there is one
        return _local.device
    except AttributeError:
        return use("cpu")
