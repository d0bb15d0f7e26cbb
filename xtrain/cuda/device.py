"""The GPU as a device of the engine: its stream, its memory, copies to and from it, capture.

Everything runs on one stream a thread, never the default stream, which cannot be captured. Copies
from the host go through pinned buffers and return before they have run.
"""

import functools
import threading
from collections.abc import Callable

import cupy
import cupyx
import numpy as np

from xtrain.cuda import memory
from xtrain.cuda.graph import CapturedStep
from xtrain.engine.device import Device, MemoryUse
from xtrain.engine.dtype import float64
from xtrain.errors import UsageError

STAGES = 4  # pinned buffers of one size: two arrays of a step, two steps in flight

_local = threading.local()


class CudaDevice(Device):
    """The current GPU. What a phase switches off: `captures`, `use_pool`, `op_sync`, `variants`."""

    name = "cuda"
    xp = cupy
    foreign = frozenset({float64.num})

    def __init__(self):
        super().__init__()
        self.variants = {"attention": "flash"}  # until features say otherwise
        self.stream = _thread_stream()
        self.captures = True  # whether `capture` captures; else every step runs eagerly
        self.tf32 = False  # whether fp32 products may round their operands to TF32
        self.bytes_to_host = 0  # copied by `host` so far
        self._staging = _Staging()
        self.stream.use()
        self.use_pool(True)

    def configure(self, *, op_sync: bool, pool: bool, capture: bool) -> None:
        """Take the choices of a phase: whether the host waits for every op, whether memory is
        pooled, whether a step is captured."""
        self.op_sync, self.captures = op_sync, capture
        self.use_pool(pool)

    @functools.cached_property
    def description(self) -> str:
        """Name of the GPU, driver and CUDA versions, in one line."""
        from xtrain.cuda.runtime import facts

        found = facts()
        return (
            f"{found['device']}, driver CUDA {found['driver_cuda']}, "
            f"runtime CUDA {found['runtime_cuda']}"
        )

    def array(self, host: np.ndarray):
        """Copy a host array to the device."""
        return cupy.array(host)

    def flat(self, size: int, dtype):
        """A zeroed 1-D array; the driver aligns it to more than any vector load needs."""
        return cupy.zeros(size, dtype)

    def write(self, array, host: np.ndarray) -> None:
        """Copy a host array into a device array, which stays in place; nothing is allocated.

        Returns before the copy has run; `host` may be changed at once.
        """
        if array.shape != host.shape or array.dtype != host.dtype:
            raise ValueError(
                f"write: the host array is {host.dtype} {host.shape}, the device array "
                f"{array.dtype} {array.shape}"
            )
        if array.size:
            self._staging.copy(array, host, self.stream)

    def host(self, array) -> np.ndarray:
        """Copy a device array to the host; waits for the stream. The bytes are counted."""
        if not isinstance(array, cupy.ndarray):
            return np.asarray(array)
        self.bytes_to_host += array.nbytes
        return array.get()

    def synchronize(self) -> None:
        """Wait until everything queued on the stream is done."""
        self.stream.synchronize()

    def capture(self, step: Callable, inputs: Callable[[], dict] | None = None) -> Callable:
        """`step` as a CUDA graph after two eager calls; see `CapturedStep`.

        Raises UsageError when the device was told to wait on the host inside a step.
        """
        if not self.captures:
            return step
        if self.op_sync or "host" in self.variants.values():
            raise UsageError(
                "features.capture=true needs features.op_sync=false and features.optimizer=device: "
                "a step that waits for the host cannot be captured"
            )
        return CapturedStep(step, self.stream, inputs)

    def use_pool(self, pooled: bool) -> None:
        """Take the process's device memory from a pool, or ask the driver for every array."""
        memory.unpooled().release()
        source = memory.shared_pool() if pooled else memory.unpooled()
        cupy.cuda.set_allocator(source.allocate)

    def memory(self) -> MemoryUse:
        """What was asked of the driver so far, and what is held."""
        return memory.account().use()

    def peak_of(self, action: Callable[[], object]) -> int:
        """Bytes that the pools held at the fullest moment of `action`, beyond those before it."""
        self.restart_peak()
        before = self.memory().reserved_bytes
        kept = action()
        self.synchronize()
        del kept
        return self.memory().peak_bytes - before

    def free_bytes(self) -> int:
        """What the driver could still give, to whoever asks first."""
        return cupy.cuda.runtime.memGetInfo()[0]

    def other_processes(self) -> int:
        """How many other processes use the GPU now: no time is worth measuring beside them."""
        from xtrain.cuda.runtime import other_processes

        return other_processes()

    def release_unused(self) -> None:
        """Give memory that no array uses back to the driver."""
        super().release_unused()
        self.synchronize()
        memory.release_unused()

    def restart_peak(self) -> None:
        """Give unused memory back to the driver and count the peak anew."""
        self.release_unused()
        memory.account().restart_peak()


def _thread_stream():
    """This thread's stream on the current GPU; one, because a pool keeps freed blocks by stream."""
    if not hasattr(_local, "streams"):
        _local.streams = {}
    number = cupy.cuda.runtime.getDevice()
    if number not in _local.streams:
        _local.streams[number] = cupy.cuda.Stream(non_blocking=True)
    return _local.streams[number]


class _Staging:
    """Pinned host buffers, used in turn; a buffer is free again when its copy has run."""

    def __init__(self):
        self._rings: dict[int, list] = {}  # by size in bytes: (buffer, event) pairs, oldest first

    def copy(self, array, host: np.ndarray, stream) -> None:
        assert array.flags.c_contiguous
        ring = self._rings.setdefault(array.nbytes, [])
        if len(ring) < STAGES:
            buffer = cupyx.empty_pinned(array.nbytes, np.uint8)
            event = cupy.cuda.Event(disable_timing=True)
        else:
            buffer, event = ring.pop(0)
            event.synchronize()
        np.copyto(buffer.view(host.dtype).reshape(host.shape), host)
        array.data.copy_from_host_async(buffer.ctypes.data, array.nbytes, stream)
        event.record(stream)
        ring.append((buffer, event))
