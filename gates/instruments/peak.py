"""The most memory that something holds at once, and bits that differ, for the gates."""

import gc
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

from xtrain.engine import device
from xtrain.engine.device import Device


def peak_bytes(here: Device, action: Callable[[], object]) -> int:
    """Bytes held at the fullest moment of `action`, beyond what was held before it.

    On a GPU what its memory pools took from the driver; on a CPU what NumPy allocated.
    """
    gc.collect()
    if here.name == "cuda":
        here.restart_peak()
        before = here.memory().reserved_bytes
        kept = action()
        here.synchronize()
        del kept
        return here.memory().peak_bytes - before
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def process_peak_bytes() -> int:
    """The most that this process held so far: in a GPU's pools where it uses one, else of memory.

    Not `ru_maxrss`, in which a child begins with what its parent held.
    """
    here = device.current()
    if here.name == "cuda":
        return here.memory().peak_bytes
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def differing_bits(one, other) -> int:
    """Elements of two host arrays whose bits differ; all of them when the shapes do."""
    one, other = np.ascontiguousarray(one), np.ascontiguousarray(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return max(one.size, other.size, 1)
    size = (one.size, one.itemsize)
    raw = (array.reshape(-1).view(np.uint8).reshape(size) for array in (one, other))
    return int(np.not_equal(*raw).any(axis=1).sum())
