"""Where arrays live and which kernels run: which backend runs is chosen here, lazily.

A device gives its array module (`xp`: NumPy or CuPy), moves arrays, and captures a step. Kernels
plug themselves into the ops when their package is imported (`xtrain.cpu`, `xtrain.cuda`), so the
engine never imports them at load time.
"""

import gc
import importlib
import importlib.util
import threading
from collections.abc import Callable

import numpy as np

from xtrain.engine import debug
from xtrain.errors import UsageError

NAMES = ("auto", "cpu", "cuda")


class Device:
    """The CPU. A subclass in `xtrain.cuda` overrides what differs on a GPU."""

    name = "cpu"
    xp = np

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
