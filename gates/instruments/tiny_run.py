"""A training run of a second: what the engine's gates and tests train, kill, resume and compare.

    python -m gates.instruments.tiny_run DIRECTORY [--device cpu|cuda] [--kill-at STEP]

trains in DIRECTORY to the end, continuing from its last complete checkpoint. With --kill-at the
process ends itself by SIGKILL after that step. The model, the loop, the optimizer, the windows and
the checkpoints are the project's own; only the sizes and the token stream are made up here.
DIRECTORY/trace.jsonl has one line a step, floats written by `repr`, so bits can be compared.
"""

import argparse
import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xtrain.data.packing import EvalWindows, PackedWindows
from xtrain.data.shards import ShardWriter, open_shard
from xtrain.engine import device as devices
from xtrain.engine.device import Device
from xtrain.engine.params import FlatBuffers
from xtrain.models.config import Qwen3Config
from xtrain.models.qwen3 import Qwen3
from xtrain.train import checkpoint, loop
from xtrain.train.config import OptimConfig, TrainConfig
from xtrain.train.evaluate import evaluate
from xtrain.train.learner import make_learner
from xtrain.train.objectives.next_token import next_token
from xtrain.train.optimizer import AdamW
from xtrain.train.step import TrainingStep

MODEL = Qwen3Config(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    vocab_size=97,
)
OPTIM = OptimConfig(lr=5e-3, warmup_steps=6)
# 24 steps over an epoch of 10: the end of the warm-up, the cosine tail and two epoch ends are seen.
TRAIN = TrainConfig(
    max_tokens=24 * 32,
    batch_size=2,
    seq_len=8,
    accumulation=2,
    dropout=0.1,
    log_every_steps=1,
    eval_every_steps=8,
    eval_tokens=60,
    save_every_steps=4,
)
STEPS = TRAIN.total_steps
WINDOWS = 39  # not a multiple of the 4 windows of a step: epochs end inside steps
SEED = 11


@dataclass(frozen=True)
class Tiny:
    """A learner's parts, and the step that trains it."""

    model: Qwen3
    buffers: FlatBuffers
    optimizer: AdamW
    step: TrainingStep


def build(
    device: Device,
    *,
    config: Qwen3Config = MODEL,
    optim: OptimConfig = OPTIM,
    seed: int = SEED,
    dropout: float = 0.0,
    remat: str = "none",
    precision: str = "fp32",
    objective: Callable = next_token,
) -> Tiny:
    """A freshly initialized model of a configuration and all that a step needs."""
    learner = make_learner(
        config, optim, device, seed=seed, precision=precision, remat=remat, dropout=dropout
    )
    step = learner.step(objective, seed=seed, dropout=dropout)
    return Tiny(learner.model, learner.buffers, learner.optimizer, step)


def token_stream(count: int) -> np.ndarray:
    """(count,) ids with something to learn: a walk whose steps repeat every five tokens."""
    return (np.cumsum(np.tile([3, 14, 15, 92, 65], -(-count // 5)))[:count]) % MODEL.vocab_size


def sources(directory: Path) -> tuple[PackedWindows, EvalWindows]:
    """The training and the evaluation source over shards in a directory, written when missing."""
    made = {"vocab_size": MODEL.vocab_size, "tokenizer": hashlib.sha256(b"tiny").hexdigest()}
    stream, train_tokens = token_stream(WINDOWS * TRAIN.seq_len + 101), WINDOWS * TRAIN.seq_len + 1
    shards = []
    for name, ids in (("train", stream[:train_tokens]), ("heldout", stream[train_tokens:])):
        path = directory / f"{name}.bin"
        if not path.exists():
            with ShardWriter(path, **made) as writer:
                writer.append(ids)
        shards.append(open_shard(path, **made))
    windows = PackedWindows(
        shards[0],
        seed=SEED,
        batch_size=TRAIN.batch_size,
        seq_len=TRAIN.seq_len,
        accumulation=TRAIN.accumulation,
    )
    return windows, EvalWindows(shards[1], seq_len=TRAIN.seq_len, max_tokens=TRAIN.eval_tokens)


def run(
    directory: Path,
    device: Device,
    *,
    until: int | None = None,
    at_end: Callable = lambda: None,
    seen: Callable = lambda number, tiny: None,
) -> Tiny:
    """Train in a directory from its last complete checkpoint on; returns the trained model.

    After step `until`, `at_end` is called and, if it returns, the loop is left as an interrupted
    one would be: the steps since the last checkpoint are lost. seen: called after each step with
    its number, counted from 1, and the model, whose step still holds what it was given.
    """
    directory.mkdir(parents=True, exist_ok=True)
    train_source, eval_source = sources(directory)
    tiny = build(device, dropout=TRAIN.dropout)
    saved = directory / "checkpoints"
    found, _ = checkpoint.latest(saved)
    start = 0
    if found is not None:
        checkpoint.restore(found, tiny.buffers, tiny.optimizer, device)
        start = found.step

    def log(step: int, values: dict) -> None:
        kept = {name: repr(value) for name, value in values.items() if "tok_s" not in name}
        with open(directory / "trace.jsonl", "a") as file:
            file.write(json.dumps({"step": step, **kept}) + "\n")

    def measure(step: int) -> None:
        batch_size = TRAIN.batch_size
        result = evaluate(tiny.model, eval_source, batch_size=batch_size, device=device)
        log(step, {"eval_loss": result.loss})

    def save(step: int) -> None:
        checkpoint.save(saved, step, tiny.buffers, tiny.optimizer, device, {})
        checkpoint.prune(saved, saved=step, keep_last=TRAIN.keep_last, best_step=None)

    taken = iter(range(start + 1, TRAIN.total_steps + 1))

    def stop() -> None:
        number = next(taken)
        seen(number, tiny)
        if number == until:
            _end(at_end)

    hooks = loop.Hooks(
        log=log,
        evaluate=measure,
        save=save,
        stop=stop,
    )
    with contextlib.suppress(_Left):
        loop.train(
            tiny.step,
            train_source,
            start=start,
            train_config=TRAIN,
            optim_config=OPTIM,
            hooks=hooks,
        )
    return tiny


class _Left(Exception):
    """The loop was left at the step asked for."""


def _end(at_end: Callable) -> None:
    at_end()
    raise _Left


def read_trace(directory: Path) -> dict[tuple[int, str], str]:
    """(step, name of the value) -> its last logged text."""
    trace = {}
    for line in (directory / "trace.jsonl").read_text().splitlines():
        record = json.loads(line)
        step = record.pop("step")
        trace |= {(step, name): value for name, value in record.items()}
    return trace


def differing(one: dict, other: dict) -> int:
    """How many values of two traces differ; one that only one of them has differs."""
    return sum(one.get(key) != other.get(key) for key in one.keys() | other.keys())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gates.instruments.tiny_run")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--kill-at", type=int)
    options = parser.parse_args()
    run(
        options.directory,
        devices.use(options.device),
        until=options.kill_at,
        at_end=lambda: os.kill(os.getpid(), signal.SIGKILL),
    )


if __name__ == "__main__":
    main()
