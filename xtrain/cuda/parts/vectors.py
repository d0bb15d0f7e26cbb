"""Sixteen bytes at a time: how memory-bound kernels read and write fp32 and bf16 arrays.

A vector is 16 bytes: 4 fp32 or 8 bf16 elements, widened to fp32 in the registers (a local array
with constant indices) of one thread. One 16-byte load a thread and several of them in flight are
what reaches the bandwidth of a copy. Storing bf16 rounds to nearest, ties to even.

Where a row is no multiple of a vector, or an address is not aligned, the same kernels are compiled
with element-wise access. A kernel's array is a pointer to uint16 (bf16 bits) or float32.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba.types import float32, uint16, uint32

from xtrain.cuda.compile.launch import SIMULATED, device_function, storage_name

VECTOR_BYTES = 16


class Access(NamedTuple):
    """Device functions for pieces of `width` elements of one dtype.

    load(array, start, left, values, at): values[at:at + width] = array[start:start + width]
    store(array, start, left, values, at): the reverse.
    left: how many of the elements from `start` on exist; the others load as 0, are not stored.
    By whole vectors it is all or nothing, decided by left > 0.
    """

    width: int
    load: Callable
    store: Callable


@functools.cache
def width_of(dtype) -> int:
    """Elements in a vector."""
    return VECTOR_BYTES // np.dtype(dtype).itemsize


def are_aligned(row_elements: int, *arrays) -> bool:
    """Whether rows of that many elements start and end on whole vectors, in all arrays not None."""
    for a in arrays:  # asked at every launch: a generator would take twice as long
        if a is None:
            continue
        if row_elements * a.itemsize % VECTOR_BYTES or not (
            SIMULATED or a.data.ptr % VECTOR_BYTES == 0
        ):
            return False
    return True


@functools.cache
def vector_access(dtype, aligned: bool, width: int | None = None) -> Access:
    """How to reach fp32 or bf16 elements: by vector when aligned, else one by one.

    width: elements a piece, a vector's when not given: several vectors, or half a vector of bf16.
    Other pieces go one by one.
    """
    storage, vector = storage_name(dtype), width_of(dtype)
    width = vector if width is None else width
    if aligned and storage == "uint16" and 2 * width == vector:
        return Access(width, load_bf16_half, store_bf16_half)
    if not aligned or width % vector:
        return Access(width, *_element_access(storage, width))
    pair = (load_fp32, store_fp32) if storage == "float32" else (load_bf16, store_bf16)
    return Access(width, *(pair if width == vector else _several(*pair, vector, width)))


def _several(load_one: Callable, store_one: Callable, vector: int, width: int):
    @device_function
    def load_vectors(array, start, left, values, at):
        for i in range(0, width, vector):
            load_one(array, start + i, left - i, values, at + i)

    @device_function
    def store_vectors(array, start, left, values, at):
        for i in range(0, width, vector):
            store_one(array, start + i, left - i, values, at + i)

    return load_vectors, store_vectors


def _element_access(storage: str, width: int):
    is_fp32 = storage == "float32"
    widen, narrow = (same, same) if is_fp32 else (float_of_bfloat16, bfloat16_of_float)

    @device_function
    def load_elements(array, start, left, values, at):
        for i in range(width):
            values[at + i] = widen(array[start + i]) if i < left else float32(0)

    @device_function
    def store_elements(array, start, left, values, at):
        for i in range(width):
            if i < left:
                array[start + i] = narrow(values[at + i])

    return load_elements, store_elements


@functools.cache
def scalar_access(dtype) -> tuple[Callable, Callable]:
    """Device functions (array, i) -> fp32 value and (array, i, value) for single elements."""
    is_fp32 = storage_name(dtype) == "float32"
    widen, narrow = (same, same) if is_fp32 else (float_of_bfloat16, bfloat16_of_float)

    @device_function
    def load_element(array, i):
        return widen(array[i])

    @device_function
    def store_element(array, i, value):
        array[i] = narrow(value)

    return load_element, store_element


def rounding(dtype) -> Callable:
    """Device function that rounds an fp32 value as storing it in this dtype would."""
    return same if storage_name(dtype) == "float32" else rounded_to_bfloat16


if SIMULATED:
    import ml_dtypes

    def bits_of(x):
        """The 32 bits of an fp32 number."""
        return np.float32(x).view(np.uint32)

    def float_of(bits):
        """The fp32 number of 32 bits."""
        return np.uint32(bits).view(np.float32)

    def pack(low, high):
        """Two fp32 numbers rounded to bf16, in one uint32, the first in the low half."""
        pair = np.array([low, high], np.float32).astype(ml_dtypes.bfloat16)
        return pair.view(np.uint32)[0]

    def load_four(array, start, count=4):
        """The four uint32 that begin at element `start` (a multiple of four) of an array."""
        elements = 4 * count // array[start].dtype.itemsize
        return tuple(np.array([array[start + i] for i in range(elements)]).view(np.uint32))

    def load_two(array, start):
        """The two uint32 that begin at element `start` (a multiple of two) of an array."""
        return load_four(array, start, 2)

    def store_four(array, start, values):
        """Write a tuple of uint32 from element `start` on."""
        for i, value in enumerate(np.array(values, np.uint32).view(array[start].dtype)):
            array[start + i] = value

    store_two = store_four

else:
    from xtrain.cuda.parts.intrinsics import (
        bits_of,
        float_of,
        load_four,
        load_two,
        pack,
        store_four,
        store_two,
    )


@device_function
def same(x):
    return x


@device_function
def float_of_bfloat16(bits):
    return float_of(uint32(uint32(bits) << uint32(16)))


@device_function
def bfloat16_of_float(x):
    return uint16(pack(x, float32(0)) & uint32(0xFFFF))


@device_function
def rounded_to_bfloat16(x):
    return low(pack(x, float32(0)))


@device_function
def low(bits):
    """The bf16 number in the low half of a uint32, as fp32."""
    return float_of(uint32(bits << uint32(16)))


@device_function
def high(bits):
    """The bf16 number in the high half of a uint32, as fp32."""
    return float_of(uint32(bits & uint32(0xFFFF0000)))


# A vector that does not exist is read from the array's start and then dropped: a load that no
# branch guards does not keep the next one waiting.


@device_function
def load_fp32(array, start, left, values, at):
    a, b, c, d = load_four(array, start if left > 0 else 0)
    none = uint32(0)
    values[at] = float_of(a if left > 0 else none)
    values[at + 1] = float_of(b if left > 0 else none)
    values[at + 2] = float_of(c if left > 0 else none)
    values[at + 3] = float_of(d if left > 0 else none)


@device_function
def store_fp32(array, start, left, values, at):
    if left > 0:
        a, b = bits_of(values[at]), bits_of(values[at + 1])
        c, d = bits_of(values[at + 2]), bits_of(values[at + 3])
        store_four(array, start, (a, b, c, d))


@device_function
def load_bf16(array, start, left, values, at):
    a, b, c, d = load_four(array, start if left > 0 else 0)
    none = uint32(0)
    unpack(a if left > 0 else none, values, at)
    unpack(b if left > 0 else none, values, at + 2)
    unpack(c if left > 0 else none, values, at + 4)
    unpack(d if left > 0 else none, values, at + 6)


@device_function
def store_bf16(array, start, left, values, at):
    if left > 0:
        a, b = pack(values[at], values[at + 1]), pack(values[at + 2], values[at + 3])
        c, d = pack(values[at + 4], values[at + 5]), pack(values[at + 6], values[at + 7])
        store_four(array, start, (a, b, c, d))


@device_function
def load_bf16_half(array, start, left, values, at):
    a, b = load_two(array, start if left > 0 else 0)
    none = uint32(0)
    unpack(a if left > 0 else none, values, at)
    unpack(b if left > 0 else none, values, at + 2)


@device_function
def store_bf16_half(array, start, left, values, at):
    if left > 0:
        a, b = pack(values[at], values[at + 1]), pack(values[at + 2], values[at + 3])
        store_two(array, start, (a, b))


@device_function
def unpack(bits, values, at):
    """Both bf16 numbers of a uint32, as fp32."""
    values[at] = low(bits)
    values[at + 1] = high(bits)
