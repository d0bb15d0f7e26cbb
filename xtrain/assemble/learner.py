"""A run's model, storage, optimizer and data on a device: what training and its gate both build."""

import math

from xtrain.config.schema import Features, RunConfig
from xtrain.data.dataset import Prepared
from xtrain.data.eval_set import EvalSet
from xtrain.data.packing import EvalWindows, PackedWindows
from xtrain.engine import device as devices
from xtrain.engine.device import Device
from xtrain.train.evaluate import Evaluation, evaluate
from xtrain.train.learner import Learner, make_learner
from xtrain.train.objectives.next_token import next_token
from xtrain.train.step import TrainingStep

# The ops that run another than their default kernel where a feature has this value. On a CPU the
# host is the device.
VARIANTS = {
    ("gemm", "tiled"): ("linear", "matmul"),
    ("optimizer", "host"): ("adamw", "global_norm"),
    ("attention", "flash"): ("attention",),
}


def build(run: RunConfig, *, initialize: bool = True, training: bool = True) -> Learner:
    """The model of a run with its initial weights; the run's device and features are resolved.

    initialize: False leaves the weights at zero, for a model that is read from disk. training:
    False for one that is only asked, a quarter of the memory.
    """
    device = devices.use(run.device)
    configure(device, run.features)
    return make_learner(
        run.model,
        run.optim,
        device,
        seed=run.seed if initialize else None,
        precision=run.features.precision,
        remat=run.features.remat,
        dropout=run.train.dropout,
        qk_norm=run.features.qk_norm,
        training=training,
    )


def training_step(run: RunConfig, learner: Learner) -> TrainingStep:
    """The step that pretraining repeats: next-token, with the run's seed and dropout."""
    return learner.step(next_token, seed=run.seed, dropout=run.train.dropout)


def configure(device: Device, features: Features) -> None:
    """Make a device work as resolved features say, whatever it was told before."""
    device.variants = {
        op: value
        for (feature, value), ops in VARIANTS.items()
        if getattr(features, feature) == value and (value, device.name) != ("host", "cpu")
        for op in ops
    }
    device.configure(op_sync=features.op_sync, pool=features.pool, capture=features.capture)


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


def heldout_loss(run: RunConfig, learner: Learner, held_out: EvalWindows) -> Evaluation:
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
    found = heldout_loss(run, learner, windows)
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
