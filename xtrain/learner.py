"""A run's model, storage, optimizer and data on a device: what training and its gate both build."""

from dataclasses import dataclass

from xtrain.config import RunConfig
from xtrain.data.dataset import Prepared
from xtrain.data.packing import EvalWindows, PackedWindows
from xtrain.engine import device as devices
from xtrain.engine.device import Device
from xtrain.engine.params import FlatBuffers
from xtrain.models.qwen3 import Qwen3
from xtrain.train.evaluate import Evaluation, evaluate
from xtrain.train.optimizer import AdamW


@dataclass(frozen=True)
class Learner:
    """A model with its storage and optimizer on a device."""

    model: Qwen3
    buffers: FlatBuffers
    optimizer: AdamW
    device: Device


def build(run: RunConfig) -> Learner:
    """The model of a run with its initial weights; the run's device and features are resolved."""
    device = devices.use(run.device)
    if run.features.gemm == "tiled":
        device.variants.update({"linear": "tiled", "matmul": "tiled"})
    model = Qwen3(
        run.model,
        qk_norm=run.features.qk_norm,
        remat_mode=run.features.remat,
        dropout=run.train.dropout,
    )
    buffers = FlatBuffers(model.named_parameters(), device, run.features.precision)
    buffers.initialize(run.seed, device)
    return Learner(model, buffers, AdamW(buffers, run.optim, device), device)


def training_windows(run: RunConfig, prepared: Prepared) -> PackedWindows:
    """The training source. Unbatched, each sequence is a micro-batch of its own, same order."""
    train, batched = run.train, run.features.batched
    return PackedWindows(
        prepared.train,
        seed=run.seed,
        batch_size=train.batch_size if batched else 1,
        seq_len=train.seq_len,
        accumulation=train.accumulation * (1 if batched else train.batch_size),
        respect_documents=run.data.respect_documents,
    )


def eval_windows(run: RunConfig, prepared: Prepared) -> EvalWindows:
    """The fixed held-out set of a run."""
    return EvalWindows(
        prepared.heldout,
        seq_len=run.train.seq_len,
        max_tokens=run.train.eval_tokens,
        respect_documents=run.data.respect_documents,
    )


def measure(run: RunConfig, learner: Learner, held_out: EvalWindows) -> Evaluation:
    """The loss of the learner's model on a held-out set."""
    rows = run.train.batch_size
    return evaluate(learner.model, held_out, batch_size=rows, device=learner.device)
