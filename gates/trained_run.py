"""What a trained run shows, measured again from its files: the gates of v0 to v12 share it.

Nothing is taken from the training process's word: the last checkpoint is loaded (its hashes are
checked), evaluated on the run's held-out set, and compared with what the same shards give a model
that knows only word frequencies.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gates.gate import NotMeasured
from xtrain.config import RunConfig, config_fingerprint, load_saved
from xtrain.data.dataset import prepare, unigram_entropy
from xtrain.errors import UsageError
from xtrain.estimate import count_parameters
from xtrain.learner import build, eval_windows, measure
from xtrain.track import all_runs, read_metrics
from xtrain.train import checkpoint

PHASE = "pretrain"
NAMES = (
    "val_loss",
    "unigram_nats",
    "margin_over_unigram_nats",
    "params_core",
    "params_total",
    "trained_tokens",
    "missing_steps",
    "not_finite_losses",
)


def data_cache(out: Path) -> Path:
    """Where prepared data of an outputs root live."""
    return Path(out) / "data"


def measure_run(path: Path, device: str, out: Path) -> dict[str, float | NotMeasured]:
    """Values of a trained run by check name.

    val_loss (nats a token on the held-out set), unigram_nats, margin_over_unigram_nats,
    params_core, params_total, trained_tokens (of the last checkpoint), missing_steps (training
    records that metrics.jsonl lacks or has twice), not_finite_losses.
    """
    run = replace(load_saved(path / "config.yaml"), device=device)
    found, _ = checkpoint.latest(path / "checkpoints")
    if found is None:
        raise UsageError(f"{path}: no complete checkpoint")
    prepared = prepare(run.data, cache_dir=data_cache(out))
    learner = build(run)
    checkpoint.restore(found, learner.buffers, learner.optimizer, learner.device)
    loss = measure(run, learner, eval_windows(run, prepared)).loss
    unigram = unigram_entropy(prepared)
    counts = count_parameters(run.model, qk_norm=run.features.qk_norm)
    records = read_metrics(path / "metrics.jsonl", "train")
    every, last = run.train.log_every_steps, run.train.total_steps
    wanted = sorted({*range(every, last + 1, every), last})
    logged = {record["step"] for record in records}
    doubled = len(records) - len(logged)
    values = (
        loss,
        unigram,
        unigram - loss,
        counts.core,
        counts.total,
        found.manifest["tokens"],
        len(logged.symmetric_difference(wanted)) + doubled,
        sum(not math.isfinite(record["loss"]) for record in records),
    )
    return dict(zip(NAMES, values, strict=True))


def fingerprints(path: Path) -> dict[str, str]:
    """What a verdict on a trained run is bound to: its config, data and checkpoint."""
    found, _ = checkpoint.latest(path / "checkpoints")
    return {
        "config": config_fingerprint(load_saved(path / "config.yaml")),
        "data": found.manifest["data"] if found else "",
        "checkpoint": found.sha256 if found else "",
    }


def latest_run(name: str, out: Path) -> Path | None:
    """The newest finished pretraining of a run, or None."""
    finished = [r for r in all_runs(out, name, PHASE) if r.manifest["status"] == "FINISHED"]
    return finished[-1].path if finished else None


def run_measure(name: str):
    """The `run_measures` entry of the gate of a run."""

    def measure_latest(device: str, out: Path) -> Mapping[str, float | NotMeasured]:
        path = latest_run(name, out)
        if path is None:
            return dict.fromkeys(NAMES, NotMeasured(f"no finished run: xtrain run={name}"))
        return measure_run(path, device, out)

    return measure_latest


def run_artifact(name: str):
    """The `artifact` of the gate of a run: fingerprints of the newest finished one."""

    def artifact(device: str, out: Path) -> Mapping[str, str]:
        path = latest_run(name, out)
        return {} if path is None else fingerprints(path)

    return artifact
