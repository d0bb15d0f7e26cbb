"""Memory without a pool, with a driver made of Python: needs CuPy, but no GPU."""

import gc

import numpy as np
import pytest

pytest.importorskip("cupy")

import cupy

from xtrain.cuda import memory
from xtrain.errors import OutOfDeviceMemory

runtime = cupy.cuda.runtime


class Driver:
    """Hands out addresses until `room` bytes are in use.

    held: bytes by address.  returned: sizes in the order in which they came back.
    """

    CUDARuntimeError = runtime.CUDARuntimeError

    def __init__(self, room: int):
        self.room = room
        self.held: dict[int, int] = {}
        self.returned: list[int] = []
        self._next = 1 << 20

    def malloc(self, size: int) -> int:
        if sum(self.held.values()) + size > self.room:
            raise runtime.CUDARuntimeError(memory.MEMORY_ALLOCATION_ERROR)
        self._next += 1 << 12
        self.held[self._next] = size
        return self._next

    def free(self, address: int) -> None:
        self.returned.append(self.held.pop(address))

    def getDevice(self) -> int:
        return 0

    def memGetInfo(self) -> tuple[int, int]:
        return self.room - sum(self.held.values()), self.room


@pytest.fixture
def driver(monkeypatch):
    driver = Driver(room=1000)
    monkeypatch.setattr(cupy.cuda, "runtime", driver)
    monkeypatch.setattr(memory, "WAITING_BYTES", 100)
    yield driver
    gc.collect()  # while the driver is still this one


@pytest.fixture
def unpooled(driver):
    return memory.Unpooled(memory.Account())


def bytes_of(unpooled, size: int):
    with cupy.cuda.using_allocator(unpooled.allocate):
        return cupy.ndarray((size,), np.uint8)


def test_what_was_freed_waits_and_goes_back_together(driver, unpooled):
    one, other = bytes_of(unpooled, 60), bytes_of(unpooled, 50)
    del one
    assert driver.returned == []
    del other
    assert driver.returned == [60, 50]


def test_a_view_keeps_the_memory_of_its_array(driver, unpooled):
    array = bytes_of(unpooled, 200)
    view = array[150:]
    del array
    assert driver.returned == []
    del view
    assert driver.returned == [200]


def test_an_array_in_a_reference_cycle_gives_its_memory_back(driver, unpooled):
    cycle = [bytes_of(unpooled, 200)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert driver.returned == [200]


def test_what_waits_goes_back_before_memory_counts_as_full(driver, unpooled, monkeypatch):
    monkeypatch.setattr(memory, "WAITING_BYTES", 10_000)
    bytes_of(unpooled, 800)  # waits at once
    kept = bytes_of(unpooled, 900)
    assert driver.returned == [800] and kept.size == 900
    with pytest.raises(OutOfDeviceMemory, match="GPU memory is full"):
        bytes_of(unpooled, 200)


def test_every_array_is_one_request(driver, unpooled):
    for _ in range(3):
        bytes_of(unpooled, 60)
    assert unpooled._account.allocations == 3


def test_what_is_not_a_full_memory_is_not_called_one(driver, unpooled, monkeypatch):
    def fails(size):
        raise runtime.CUDARuntimeError(700)

    monkeypatch.setattr(driver, "malloc", fails)
    with pytest.raises(runtime.CUDARuntimeError):
        bytes_of(unpooled, 60)
