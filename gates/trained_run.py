"""What a run shows, measured from its configuration and from its files: the gate of every run.

A run file `conf/run/NAME.yaml` needs no gate file of its own: `gate_of(NAME)` is its gate, and the
bars stand in the run file. Parameter counts and differences from the parent are known before
anything is trained; the rest needs a finished run. Nothing is taken from the training process's
word: the last checkpoint is loaded (its hashes are checked), evaluated on the run's held-out set,
and compared with what the same shards give a model that knows only word frequencies.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

from gates.judging.gate import Defect, Explained, Gate, NotMeasured
from xtrain.assemble.learner import build, eval_windows, measure
from xtrain.config.compose import compose, load_run, load_saved, read_tree
from xtrain.config.files import conf_dir
from xtrain.config.identity import config_fingerprint, undeclared_differences
from xtrain.config.rules import AXES
from xtrain.config.schema import RunConfig
from xtrain.data.dataset import data_cache, prepare, unigram_entropy
from xtrain.errors import UsageError
from xtrain.models.counts import count_parameters
from xtrain.track.run_dir import all_runs, read_metrics
from xtrain.train import checkpoint

PHASE = "pretrain"
OF_TRAINING = (
    "val_loss",
    "unigram_nats",
    "margin_over_unigram_nats",
    "trained_tokens",
    "missing_steps",
    "not_finite_losses",
)
# For the seeded defect: a key of each axis and another value of it.
ELSEWHERE = {
    "model": {"model": {"rope_theta": 12_345.0}},
    "data": {"data": {"heldout_fraction": 0.123}},
    "precision": {"optim": {"eps": 1.23e-6}},
    "infra": {"features": {"batched": False}},
}


def measure_run(path: Path, device: str, out: Path) -> dict[str, float | NotMeasured]:
    """Values of a trained run by check name.

    val_loss (nats a token on the held-out set), unigram_nats, margin_over_unigram_nats,
    trained_tokens (of the last checkpoint), missing_steps (records that metrics.jsonl lacks
    or has twice), not_finite_losses; and those of `measure_config`.
    """
    run = replace(load_saved(path / "config.yaml"), device=device)
    found, _ = checkpoint.latest(path / "checkpoints")
    if found is None:
        raise UsageError(f"{path}: no complete checkpoint")
    prepared = prepare(run.data, cache_dir=data_cache(out))
    learner = build(run, initialize=False)  # the checkpoint has every weight
    checkpoint.restore(found, learner.buffers, learner.optimizer, learner.device)
    loss = measure(run, learner, eval_windows(run, prepared)).loss
    unigram = unigram_entropy(prepared)
    records = read_metrics(path / "metrics.jsonl", "train")
    every, last = run.train.log_every_steps, run.train.total_steps
    wanted = sorted({*range(every, last + 1, every), last})
    logged = {record["step"] for record in records}
    evaluated = [record["step"] for record in read_metrics(path / "metrics.jsonl", "eval")]
    doubled = len(records) - len(logged) + len(evaluated) - len(set(evaluated))
    values = (
        loss,
        unigram,
        unigram - loss,
        found.manifest["tokens"],
        len(logged.symmetric_difference(wanted)) + doubled,
        sum(not math.isfinite(record["loss"]) for record in records),
    )
    return dict(zip(OF_TRAINING, values, strict=True)) | measure_config(run)


def measure_config(run: RunConfig) -> dict[str, float | NotMeasured]:
    """What a configuration shows by itself.

    params_core, params_total; undeclared_axes: the axes in which it differs from its parent's file
    without declaring them, with the keys.
    """
    counts = count_parameters(run.model, qk_norm=run.features.qk_norm)
    return {
        "params_core": counts.core,
        "params_total": counts.total,
        "undeclared_axes": undeclared_axes(run),
    }


def undeclared_axes(run: RunConfig) -> float | NotMeasured:
    """How many axes differ from the parent's undeclared; NotMeasured when there is no such file."""
    if run.parent is None:
        return 0.0
    try:
        found = undeclared_differences(run, composed(run.parent))
    except UsageError as error:
        return NotMeasured(f"parent={run.parent}: {error}")
    keys = (f"{axis} ({', '.join(keys)})" for axis, keys in found.items())
    return Explained(len(found), f"differs from {run.parent} in {', '.join(keys)}")


def composed(name: str) -> RunConfig:
    """The run as its file has it. Raises UsageError for an unknown name."""
    return load_run(compose([f"run={name}"]))


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


def gate_of(name: str) -> Gate:
    """The gate of a run: of its newest finished training, or of its file as far as that goes."""

    def of_config(device: str) -> Mapping[str, float | NotMeasured]:
        return measure_config(composed(name))

    def of_latest(device: str, out: Path) -> Mapping[str, float | NotMeasured]:
        path = latest_run(name, out)
        if path is None:
            return dict.fromkeys(OF_TRAINING, NotMeasured(f"no finished run: xtrain run={name}"))
        return measure_run(path, device, out)

    def artifact(device: str, out: Path) -> Mapping[str, str]:
        path = latest_run(name, out)
        return {} if path is None else fingerprints(path)

    def trained_on(device: str, out: Path) -> str | None:
        path = latest_run(name, out)
        return None if path is None else load_saved(path / "config.yaml").data.name

    stated = read_tree(conf_dir() / "run" / f"{name}.yaml")
    related = [name, stated["parent"]] if stated.get("parent") else [name]
    return Gate(
        name,
        stated.get("gate", {}).get("title", ""),
        measures=(of_config,),
        run_measures=(of_latest,),
        defects=_defects(name, stated, of_config),
        composes=tuple(f"run/{each}" for each in related),
        artifact=artifact,
        trained_on=trained_on,
    )


def _defects(name: str, stated: Mapping, of_config) -> tuple[Defect, ...]:
    def one_layer_more():
        layers = composed(name).model.num_hidden_layers + 1
        return _changed(name, {"model": {"num_hidden_layers": layers}})

    def another_axis():
        return _changed(name, ELSEWHERE[undeclared[0]])

    undeclared = [axis for axis in AXES if axis not in stated.get("axes", ())]
    defects = [Defect("one layer more", "params_core", of_config, one_layer_more)]
    if stated.get("parent") and undeclared:
        changed = f"undeclared {undeclared[0]}"
        defects.append(Defect(changed, "undeclared_axes", of_config, another_axis))
    return tuple(defects)


def _changed(name: str, parts: Mapping[str, Mapping]):
    """A patch under which the file of a run has other values; those of other runs stay."""
    sound = composed

    def altered(wanted: str) -> RunConfig:
        run = sound(wanted)
        if wanted != name:
            return run
        return replace(run, **{k: replace(getattr(run, k), **v) for k, v in parts.items()})

    return mock.patch(f"{__name__}.composed", altered)
