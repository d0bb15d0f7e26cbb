"""CUDA kernels and the device that runs them; nothing of CUDA is imported before it is needed."""

import importlib
import os
import pkgutil

# The driver reads this when it starts. A captured step of v9 has thousands of kernels; the queue of
# 1024 made the host wait 183 ms in its launch, four times as long a queue lets it go in 2.5 (H200).
os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")


def make_device():
    """The current GPU as a `Device` of this thread, with every kernel plugged into its op.

    Its stream becomes CuPy's current one in this thread. Call it once a thread, after choosing the
    GPU (`cupy.cuda.Device(n).use()`) where there are several.
    """
    from xtrain.cuda.device import CudaDevice
    from xtrain.engine import debug

    if not debug.use_reference_only():
        import_kernels()
    return CudaDevice()


def import_kernels() -> None:
    """Import every file of `xtrain.cuda.kernels`: importing is fusing."""
    from xtrain.cuda import kernels

    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")
