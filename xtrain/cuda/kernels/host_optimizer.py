"""The variant `host` of the optimizer's ops: gradients go to the host, weights come back.

What training costs when the optimizer does not run on the GPU; for comparison only. The host runs
the reference, so the numbers are those of the kernels. It reads on the host, so it cannot be
captured.
"""

import numpy as np

from xtrain.engine import device
from xtrain.engine.ops.adamw import adamw
from xtrain.engine.ops.global_norm import global_norm


def update_on_host(xp, p, g, m, v, hyper, copy, **attrs):
    """See `xtrain.engine.ops.adamw`; copies four buffers to the host and back."""
    read = device.current().host
    on_host = [read(buffer) for buffer in (p, g, m, v)]
    host_copy = None if copy is None else np.empty(copy.shape, copy.dtype)
    adamw.reference.forward(np, *on_host, read(hyper), host_copy, **attrs)
    for buffer, host in zip((p, g, m, v), on_host, strict=True):
        buffer.set(host)
    if copy is not None:
        copy.set(host_copy)
    return p, None


def norm_on_host(xp, gradient):
    """See `xtrain.engine.ops.global_norm`; copies the gradient to the host."""
    norm, _ = global_norm.reference.forward(np, device.current().host(gradient))
    return xp.asarray(norm), None


adamw.fuse("cuda", update_on_host, variant="host", simulated=False)
global_norm.fuse("cuda", norm_on_host, variant="host", simulated=False)
