"""Device memory: pools that count what they ask of the driver, and the error when it is full.

A pool keeps what was freed and hands it out again in stream order, so that a steady step asks the
driver for nothing. A captured step has a pool of its own: a replay writes to the addresses that it
was captured with, which therefore must never be handed to anybody else.
"""

import functools
import sys
import weakref

import cupy

from xtrain.engine.device import MemoryUse
from xtrain.errors import OutOfDeviceMemory

GIB = 2.0**30
WAITING_BYTES = 1 << 30  # freed by single arrays, before they go back to the driver together
MEMORY_ALLOCATION_ERROR = 2  # cudaErrorMemoryAllocation


class Account:
    """What all pools of a process have asked of the driver."""

    def __init__(self):
        self.allocations = 0
        self.peak_bytes = 0
        self.pools: weakref.WeakSet = weakref.WeakSet()

    def use(self) -> MemoryUse:
        """The counts so far, of the current GPU's pools."""
        reserved = self.reserved_bytes()
        return MemoryUse(self.allocations, reserved, max(self.peak_bytes, reserved))

    def reserved_bytes(self) -> int:
        return sum(pool.reserved_bytes() for pool in self.pools)

    def restart_peak(self) -> None:
        """Count the peak anew from what is held now."""
        self.peak_bytes = self.reserved_bytes()

    def driver_malloc(self, size: int):
        """Memory straight from the driver; counted."""
        self.allocations += 1
        memory = cupy.cuda.memory._malloc(size)
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes())
        return memory


class Pool:
    """A CuPy memory pool whose blocks are counted in an account; `allocate` is a CuPy allocator."""

    def __init__(self, account: Account):
        self._pool = cupy.cuda.MemoryPool(account.driver_malloc)
        account.pools.add(self)
        # A CuPy pool that is only dropped keeps its free blocks from the driver for good: 33 GB for
        # one captured step of v8 (H200, CuPy 14.2).
        weakref.finalize(self, self._pool.free_all_blocks).atexit = False

    def allocate(self, size: int):
        """Memory of at least `size` bytes; raises OutOfDeviceMemory when there is none."""
        try:
            return self._pool.malloc(size)
        except cupy.cuda.memory.OutOfMemoryError:
            # What evaluation left lies unused. Pools of captured steps are in use by replays.
            release_unused()
        try:
            return self._pool.malloc(size)
        except cupy.cuda.memory.OutOfMemoryError:
            raise _full(size) from None

    def reserved_bytes(self) -> int:
        """Bytes that the pool holds on the current GPU, handed out or not."""
        return self._pool.total_bytes()

    def release(self) -> None:
        """Give blocks that nobody uses back to the driver."""
        self._pool.free_all_blocks()


@functools.cache
def account() -> Account:
    """The process's account."""
    return Account()


@functools.cache
def shared_pool() -> Pool:
    """The pool of everything that is not captured."""
    return Pool(account())


def lasting():
    """A context whose arrays come from the shared pool, also inside a captured step.

    For what is made once and kept, such as tables: it must not go when that step's pool goes.
    """
    return cupy.cuda.using_allocator(shared_pool().allocate)


class Unpooled:
    """Every array asks the driver for its memory: what a pool saves; for comparison only.

    What was freed waits until WAITING_BYTES of it do, and goes back together: the driver lets the
    GPU finish its work before it takes memory back, so one at a time would leave the GPU idle
    between any two ops. Requests are counted; what is held so is in no pool and no peak.
    """

    def __init__(self, account: Account):
        self._account = account
        self._waiting: list[int] = []  # addresses
        self._waiting_bytes = 0

    def allocate(self, size: int):
        """Memory of `size` bytes, a CuPy allocator; raises OutOfDeviceMemory when there is none."""
        self._account.allocations += 1
        try:
            address = _from_driver(size)
        except OutOfDeviceMemory:
            self.release()
            address = _from_driver(size)
        owner, device = _Owner(self, address, size), cupy.cuda.runtime.getDevice()
        memory = cupy.cuda.UnownedMemory(address, size, owner, device)
        return cupy.cuda.MemoryPointer(memory, 0)

    def release(self) -> None:
        """Give what waits back to the driver."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for address in waiting:
            cupy.cuda.runtime.free(address)

    def let_go(self, address: int, size: int) -> None:
        """Nobody uses the memory any more."""
        self._waiting.append(address)
        self._waiting_bytes += size
        if self._waiting_bytes > WAITING_BYTES:
            self.release()


class _Owner:
    """Whose end is the end of an array's memory.

    A class with `__del__`, because that runs whole also for an array in a reference cycle, where
    CuPy's own allocators of Python functions have lost their functions when they are to free.
    """

    __slots__ = ("address", "size", "source")

    def __init__(self, source: Unpooled, address: int, size: int):
        self.source, self.address, self.size = source, address, size

    def __del__(self, is_finalizing=sys.is_finalizing):
        if not is_finalizing():  # then the driver takes all of it back
            self.source.let_go(self.address, self.size)


@functools.cache
def unpooled() -> Unpooled:
    """The process's requests of single arrays."""
    return Unpooled(account())


def release_unused() -> None:
    """Give back to the driver what no array uses, but for the pools of captured steps."""
    shared_pool().release()
    unpooled().release()


def _from_driver(size: int) -> int:
    try:
        return cupy.cuda.runtime.malloc(size)
    except cupy.cuda.runtime.CUDARuntimeError as problem:
        if problem.status != MEMORY_ALLOCATION_ERROR:
            raise
        raise _full(size) from None


def _full(size: int) -> OutOfDeviceMemory:
    free, total = cupy.cuda.runtime.memGetInfo()
    return OutOfDeviceMemory(
        f"GPU memory is full: {size / GIB:.2f} GiB more needed, {free / GIB:.2f} of "
        f"{total / GIB:.0f} GiB free; halve train.batch_size and double train.accumulation, or set "
        "features.remat=block",
        total,
    )
