"""A run's model, storage, optimizer and data on a device: what training and its gate both build."""

import math
from dataclasses import dataclass

from xtrain.config.schema import Features, RunConfig
from xtrain.data.dataset import Prepared
from xtrain.data.eval_set import EvalSet
from xtrain.data.packing import EvalWindows, PackedWindows
from xtrain.engine import device as devices
from xtrain.engine.device import Device
from xtrain.engine.params import FlatBuffers
from xtrain.models.qwen3 import Qwen3
from xtrain.train.evaluate import Evaluation, evaluate
from xtrain.train.objectives.next_token import next_token
from xtrain.train.optimizer import AdamW
from xtrain.train.step import TrainingStep


@dataclass(frozen=True)
class Learner:
    """A model with its storage and optimizer on a device."""

    model: Qwen3
    buffers: FlatBuffers
    optimizer: AdamW
    device: Device


def build(run: RunConfig, *, initialize: bool = True) -> Learner:
    """The model of a run with its initial weights; the run's device and features are resolved.

    initialize: False leaves the weights at zero, for a model that is read from disk.
    """
    device = devices.use(run.device)
    configure(device, run.features)
    model = Qwen3(
        run.model,
        qk_norm=run.features.qk_norm,
        remat_mode=run.features.remat,
        dropout=run.train.dropout,
    )
    buffers = FlatBuffers(model.named_parameters(), device, run.features.precision)
    if initialize:
        buffers.initialize(run.seed, device)
    return Learner(model, buffers, AdamW(buffers, run.optim, device), device)


def training_step(run: RunConfig, learner: Learner) -> TrainingStep:
    """The step that pretraining repeats: next-token, with the run's seed and dropout."""
    return TrainingStep(
        learner.model,
        learner.optimizer,
        next_token,
        seed=run.seed,
        device=learner.device,
        dropout=run.train.dropout,
    )


def configure(device: Device, features: Features) -> None:
    """Make a device work as resolved features say, whatever it was told before."""
    for name in ("linear", "matmul"):
        device.variants.pop(name, None)
        if features.gemm == "tiled":
            device.variants[name] = "tiled"
    device.configure(
        optimizer=features.optimizer,
        op_sync=features.op_sync,
        pool=features.pool,
        capture=features.capture,
    )


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


def measure_on_set(
    run: RunConfig, learner: Learner, chosen: EvalSet, max_tokens: int | None = None
) -> dict:
    """The result of a model on a named set, as eval.json holds it.

    loss: nats a token, in windows of the run's seq_len. bits_per_byte: the same in bits, over the
    UTF-8 bytes of the text. Standard errors are of means over tokens. Documents are not kept apart,
    whatever the run does: every model is asked for every token. max_tokens: only the first ones.
    """
    windows = EvalWindows(chosen.shard, seq_len=run.train.seq_len, max_tokens=max_tokens)
    found = measure(run, learner, windows)
    bits = chosen.manifest["tokens"] / (math.log(2) * chosen.manifest["bytes"])
    return {
        "set": chosen.manifest,
        "seq_len": run.train.seq_len,
        "precision": run.features.precision,
        "device": run.device,
        "loss": found.loss,
        "standard_error": found.standard_error,
        "perplexity": found.perplexity,
        "bits_per_byte": found.loss * bits,
        "bits_per_byte_standard_error": found.standard_error * bits,
        "tokens": found.tokens,
    }
