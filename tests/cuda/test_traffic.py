"""What a captured step hands to the host, and what is counted of it."""

import numpy as np
import pytest

from xtrain.engine import device as devices

pytestmark = pytest.mark.cuda


@pytest.fixture
def device():
    return devices.use("cuda")


def test_bytes_read_on_the_host_are_counted(device):
    before = device.bytes_to_host
    device.host(device.xp.zeros((3, 5), np.float64))
    device.host(device.xp.zeros((), np.int64))
    assert device.bytes_to_host - before == 3 * 5 * 8 + 8


def test_a_copy_to_the_host_inside_a_graph_is_refused(device):
    import cupyx

    target = cupyx.empty_pinned(1000, np.float32)
    source = device.xp.ones(1000, np.float32)

    def copies():
        source.data.copy_to_host_async(target.ctypes.data, source.nbytes, device.stream)
        return source + 1

    run = device.capture(copies)
    run()
    run()
    with pytest.raises(RuntimeError, match="capturing"):
        run()


def test_a_graph_that_stays_on_the_device_copies_nothing(device):
    x, y = device.xp.ones(1000, np.float32), device.xp.zeros(1000, np.float32)

    def moves():
        y[...] = x
        return x.sum()

    run = device.capture(moves)
    for _ in range(3):
        run()
    assert run.bytes_to_host == 0


def test_the_host_optimizer_hands_over_all_four_buffers(device):
    from xtrain.engine.ops.adamw import adamw

    device.variants["adamw"] = "host"
    buffers = [device.xp.ones(64, np.float32) for _ in range(4)]
    hyper = device.array(np.array([1e-3, 0.1, 0.2, 1.0, 1.0], np.float32))
    before = device.bytes_to_host
    fixed = {"decayed": 64, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    adamw.run(*buffers, hyper, None, **fixed)
    assert device.bytes_to_host - before == 4 * 64 * 4 + 5 * 4
