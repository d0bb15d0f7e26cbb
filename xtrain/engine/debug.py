"""Every environment variable that the engine reads, with its meaning; read nowhere else.

Read when a device is made current (`device.use`), not at every op.

XTRAIN_KERNELS=reference   run the readable reference of every op instead of its kernels: the first
                           bisection when a loss is wrong
XTRAIN_DEBUG=1             check every op's outputs for NaN and infinity and name the op
"""

import os


def use_reference_only() -> bool:
    """Whether kernels are switched off; an unknown value is an error, never a silent default."""
    value = os.environ.get("XTRAIN_KERNELS", "fused")
    if value not in ("fused", "reference"):
        raise ValueError(f"XTRAIN_KERNELS={value!r}: use 'fused' or 'reference'")
    return value == "reference"


def check_values() -> bool:
    """Whether every op's outputs are checked."""
    value = os.environ.get("XTRAIN_DEBUG", "0")
    if value not in ("0", "1"):
        raise ValueError(f"XTRAIN_DEBUG={value!r}: use 0 or 1")
    return value == "1"
