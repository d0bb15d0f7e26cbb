"""A checkpoint written on a GPU goes on, on a GPU, with the same bits."""

import numpy as np
import pytest
from test_capture import CONFIG, batch_of

from xtrain.engine import device as devices
from xtrain.engine.params import FlatBuffers
from xtrain.models.qwen3 import Qwen3
from xtrain.train import checkpoint
from xtrain.train.config import OptimConfig
from xtrain.train.objectives.next_token import next_token
from xtrain.train.optimizer import AdamW
from xtrain.train.step import TrainingStep

pytestmark = pytest.mark.cuda


def trained(device, numbers, start=None):
    """(buffers, optimizer) after the steps of these numbers."""
    model = Qwen3(CONFIG)
    buffers = FlatBuffers(model.named_parameters(), device, "bf16")
    buffers.initialize(3, device)
    optimizer = AdamW(buffers, OptimConfig(lr=1e-3), device)
    if start is not None:
        checkpoint.restore(start, buffers, optimizer, device)
    step = TrainingStep(model, optimizer, next_token, seed=5, device=device, dropout=0.0)
    for number in numbers:
        step.load(batch_of(number), number, 1e-3)
        step.run()
    return buffers, optimizer


def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path):
    device = devices.use("cuda")
    whole, _ = trained(device, range(8))
    half, optimizer = trained(device, range(4))
    saved = checkpoint.save(tmp_path, 4, half, optimizer, device, {})
    resumed, _ = trained(device, range(4, 8), start=saved)
    for name in ("master", "moment1", "moment2", "copy"):
        ours, theirs = (device.host(getattr(b, name)) for b in (resumed, whole))
        np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))
