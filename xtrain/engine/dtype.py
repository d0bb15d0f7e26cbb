"""Dtypes and the casts that ops make.

bfloat16 is storage (from ml_dtypes): NumPy computes `bf16 * 1.5` in float32 but accumulates
`bf16.sum()` in bfloat16, so every op upcasts on its first line and casts back on its last.
"""

import ml_dtypes
import numpy as np

float32 = np.dtype(np.float32)
float64 = np.dtype(np.float64)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (float32, float64, bfloat16)


def compute_dtype(dtype) -> np.dtype:
    """The dtype that an op computes in: float64 stays (gradient checks), all else is float32."""
    return float64 if dtype == float64 else float32


def upcast(array):
    """The array in its compute dtype; no copy when it already is."""
    return array.astype(compute_dtype(array.dtype), copy=False)
