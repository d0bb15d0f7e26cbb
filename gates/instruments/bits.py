"""Bits that differ, for the gates."""

import numpy as np


def differing_bits(one, other) -> int:
    """Elements of two host arrays whose bits differ; all of them when the shapes do."""
    one, other = np.ascontiguousarray(one), np.ascontiguousarray(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return max(one.size, other.size, 1)
    size = (one.size, one.itemsize)
    raw = (array.reshape(-1).view(np.uint8).reshape(size) for array in (one, other))
    return int(np.not_equal(*raw).any(axis=1).sum())
