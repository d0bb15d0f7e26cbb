"""Tensor maps: what Hopper's tensor memory accelerator must know of an array to copy boxes of it.

A map is 128 bytes that a kernel takes by value (`const __grid_constant__ TensorMap`). It holds the
array's address: it is as good as the array stays where it is, also in a captured graph.
Source: CUDA driver API, cuTensorMapEncodeTiled.
"""

import ctypes
import functools

import numpy as np

BYTES, ALIGNMENT = 128, 64
BFLOAT16, SWIZZLES, PROMOTE_TO_128_BYTES = 9, {32: 1, 64: 2, 128: 3}, 2


def boxes(x, rows: int, columns: int) -> np.ndarray:
    """The map of a bf16 array (B, H, T, D), its last axis dense, for boxes of `rows` tokens.

    A box's rows of `columns` elements (32, 64 or 128 bytes) are swizzled over as many bytes, and
    are zeros beyond the last token.
    """
    return _encoded(x.data.ptr, x.shape, x.strides, rows, columns)


@functools.lru_cache(maxsize=4096)  # a step's buffers do not move: every layer asks for the same
def _encoded(address: int, shape, strides, rows: int, columns: int) -> np.ndarray:
    if any(stride % 16 for stride in strides[:3]) or address % 16:
        raise ValueError(f"tensor map: strides {strides} and the address must be multiples of 16")
    held = np.zeros(BYTES + ALIGNMENT, np.uint8)
    start = -held.ctypes.data % ALIGNMENT
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(held.ctypes.data + start),
        BFLOAT16,
        4,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 4)(*reversed(shape)),
        (ctypes.c_uint64 * 3)(*reversed(strides[:3])),
        (ctypes.c_uint32 * 4)(columns, rows, 1, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        0,  # not interleaved
        SWIZZLES[columns * 2],
        PROMOTE_TO_128_BYTES,
        0,  # zeros out of bounds
    )
    if code:
        raise RuntimeError(f"cuTensorMapEncodeTiled of {shape}, strides {strides}: error {code}")
    return np.frombuffer(held[start : start + BYTES].tobytes(), f"V{BYTES}")


@functools.cache
def _driver():
    return ctypes.CDLL("libcuda.so.1")
