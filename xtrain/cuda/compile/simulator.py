"""Numba's CUDA simulator, made deterministic: the threads of a block run in turns.

Numba runs a block's threads at once and polls until all wait at a barrier. That is slow, and two
threads may both find no shared array on a line and make one each. Here a thread runs alone until
its barrier or its end, then the next one. Fresh shared memory holds NaN, so that what is read
before it was written, because a barrier is missing, shows.
"""

import sys
import threading

import numpy as np
from numba import cuda
from numba.cuda.simulator.kernel import BlockManager, BlockThread
from numba.cuda.simulator.kernelapi import FakeCUDAShared
from numba.np import numpy_support


def run(fn, grid: int, block: int, args: list) -> None:
    """Run a kernel function on NumPy arrays, one block after the other."""
    FakeCUDAShared.array = _shared_array
    BlockManager.run = _run_block
    cuda.jit(fn)[grid, block](*args)


class _Thread(BlockThread):
    """A thread of a block that runs only in its turn."""

    def __init__(self, *args):
        super().__init__(*args)
        self.turn, self.turn_over = threading.Semaphore(0), threading.Semaphore(0)
        self.finished = False

    def run(self):
        self.turn.acquire()
        super().run()  # keeps an exception for the block
        self.finished = True
        self.turn_over.release()

    def syncthreads(self):
        self.turn_over.release()
        self.turn.acquire()
        if self.abort:
            raise RuntimeError("another thread of the block failed")

    def take_turn(self):
        self.turn.release()
        self.turn_over.acquire()


def _run_block(manager, grid_point, *args) -> None:
    """In place of `BlockManager.run`."""
    threads = [
        _Thread(lambda: manager._f(*args), manager, grid_point, point, manager._debug)
        for point in np.ndindex(*manager._block_dim)
    ]
    for thread in threads:
        thread.start()
    running = threads
    while running:
        for thread in running:
            thread.take_turn()
        failed = [thread for thread in running if thread.exception]
        running = [thread for thread in running if not thread.finished]
        if failed:
            for thread in running:
                thread.abort = True
                thread.take_turn()
            raise failed[0].exception[0].with_traceback(failed[0].exception[1])


def _shared_array(self, shape, dtype):
    """The array of the source line that asks; one line, one array."""
    caller = sys._getframe(1)
    line = caller.f_code.co_filename, caller.f_lineno
    if line not in self._allocations:
        dtype = numpy_support.as_dtype(dtype)
        fresh = np.zeros(shape, dtype)
        self._allocations[line] = fresh + np.nan if dtype.kind == "f" else fresh
    return self._allocations[line]
