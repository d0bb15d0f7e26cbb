"""What a run shows, measured from its configuration and from its files: the gate of every run.

A run file `conf/run/NAME.yaml` needs no gate file of its own: `gate_of(NAME)` is its gate, and the
bars stand in the run file. Parameter counts and differences from the parent are known before
anything is trained; the rest needs a finished run. Nothing is taken from the training process's
word: the last checkpoint is loaded (its hashes are checked), evaluated on the run's held-out set,
and compared with what the same shards give a model that knows only word frequencies, and with the
export that would be registered. What the bars take for granted (model, budget, sequences, origin,
data) is compared with the run's file: see `differing_terms`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

from gates.judging.gate import Defect, Explained, Failed, Gate, Measured, NotMeasured
from gates.judging.outlook import PROMOTING
from gates.judging.undeclared import undeclared_axes
from xtrain.assemble.learner import Learner, build, eval_windows, heldout_loss, measure_on_set
from xtrain.config.bars import (
    LOSS_ON_SET,
    are_shards_of,
    data_label,
    gate_of_file,
    known_data,
    official,
    run_gate,
)
from xtrain.config.compose import load_saved, read_tree
from xtrain.config.files import file_of
from xtrain.config.identity import changed_terms, config_fingerprint
from xtrain.config.rules import AXES
from xtrain.config.schema import GateConfig, RunConfig
from xtrain.data.dataset import Prepared, data_cache, prepare, unigram_entropy
from xtrain.data.eval_set import open_eval_set
from xtrain.errors import UsageError
from xtrain.models.counts import count_parameters
from xtrain.models.hf_import import differing_tensors
from xtrain.track.registry import export_digest
from xtrain.track.run_dir import all_runs, read_metrics, value_of
from xtrain.train import checkpoint

OF_TRAINING = (
    "val_loss",
    "unigram_nats",
    "margin_over_unigram_nats",
    "trained_tokens",
    "heldout_tokens",
    "missing_steps",
    "not_finite_losses",
    "changed_terms",
    "export_differing_tensors",
)
# For the seeded defect: a key of each axis and another value of it.
ELSEWHERE = {
    "model": {"model": {"rope_theta": 12_345.0}},
    "data": {"data": {"heldout_fraction": 0.123}},
    "precision": {"optim": {"eps": 1.23e-6}},
    "infra": {"features": {"batched": False}},
}


def measure_run(
    path: Path, device: str, out: Path, sets: Iterable[str] = ()
) -> dict[str, float | NotMeasured]:
    """Values of a trained run by check name.

    val_loss (nats a token on the held-out set), unigram_nats, margin_over_unigram_nats,
    trained_tokens (of the last checkpoint), heldout_tokens (that the loss is a mean of),
    missing_steps (records that metrics.jsonl lacks or has twice), not_finite_losses, changed_terms
    (see `differing_terms`), export_differing_tensors; for each of `sets`, names of evaluation sets,
    NAME_loss; and those of `measure_config`.
    """
    run = replace(load_saved(path / "config.yaml"), device=device)
    found, _ = checkpoint.latest(path / "checkpoints")
    if found is None:
        raise UsageError(f"{path}: no complete checkpoint")
    prepared = prepare(run.data, cache_dir=data_cache(out))
    learner = build(run, initialize=False, training=False)  # the checkpoint has every weight
    checkpoint.load_weights(found.path / checkpoint.FILES[0], learner.buffers, learner.device)
    held_out = eval_windows(run, prepared)
    loss = heldout_loss(run, learner, held_out).loss
    unigram = unigram_entropy(prepared)
    missing, not_finite = _records(path, run)
    differing = differing_terms(run, found.manifest, prepared)
    values = (
        loss,
        unigram,
        unigram - loss,
        found.manifest["tokens"],
        held_out.tokens,
        missing,
        not_finite,
        Explained(len(differing), ", ".join(differing)),
        _export_differences(run, learner, path / "export"),
    )
    on_sets = {f"{name}{LOSS_ON_SET}": _loss_on(name, run, learner, out) for name in sets}
    learner.release_()
    return dict(zip(OF_TRAINING, values, strict=True)) | on_sets | measure_config(run)


def differing_terms(run: RunConfig, facts: Mapping, prepared: Prepared) -> list[str]:
    """What of a trained run is not as the bars of its file take it for granted, a word each.

    Keys in which its config differs from the run's file; a checkpoint that was trained with another
    config or on other data than the run directory says; shards that have the fingerprint of known
    data and are others. A run without a file here brings its own terms.
    """
    stated = official(run.name) if file_of("run", run.name) else run
    differing = changed_terms(run, stated)
    recorded = {"config": config_fingerprint(run), "data": prepared.fingerprint}
    differing += [f"the checkpoint's {k}" for k in recorded if facts.get(k) != recorded[k]]
    known = known_data(run_gate(run), run.data.source, prepared.fingerprint)
    if known and not are_shards_of(known, prepared.train.sha256, prepared.heldout.sha256):
        differing.append(f"the shards of {known.name}")
    return differing


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


def fingerprints(path: Path) -> dict[str, str]:
    """What a verdict on a trained run is bound to: its config, data, checkpoint and export."""
    found, _ = checkpoint.latest(path / "checkpoints")
    return {
        "config": config_fingerprint(load_saved(path / "config.yaml")),
        "data": found.manifest["data"] if found else "",
        "checkpoint": found.sha256 if found else "",
        "export": export_digest(path),
    }


def latest_run(name: str, out: Path) -> Path | None:
    """The newest finished pretraining of a run, or None."""
    finished = [r for r in all_runs(out, name, PROMOTING) if r.manifest["status"] == "FINISHED"]
    return finished[-1].path if finished else None


def gate_of(name: str) -> Gate:
    """The gate of a run: of its newest finished training, or of its file as far as that goes."""

    stated = gate_of_file(name)

    def of_config(device: str) -> Mapping[str, float | NotMeasured]:
        return measure_config(official(name))

    def of_latest(device: str, out: Path) -> Mapping[str, float | NotMeasured]:
        path = latest_run(name, out)
        sets = sets_of(stated)
        if path is None:
            missing = NotMeasured(f"no finished run: xtrain run={name}")
            return dict.fromkeys([*OF_TRAINING, *(f"{s}{LOSS_ON_SET}" for s in sets)], missing)
        return measure_run(path, device, out, sets)

    def artifact(device: str, out: Path) -> Mapping[str, str]:
        path = latest_run(name, out)
        return {} if path is None else fingerprints(path)

    def trained_on(device: str, out: Path) -> str | None:
        path = latest_run(name, out)
        return None if path is None else label_of(path, stated)

    parent = read_tree(file_of("run", name)).get("parent")
    related = [name, parent] if parent else [name]
    return Gate(
        name,
        stated.title,
        measures=(of_config,),
        run_measures=(of_latest,),
        defects=_defects(name, of_config),
        composes=tuple(f"run/{each}" for each in related),
        artifact=artifact,
        trained_on=trained_on,
    )


def label_of(path: Path, gate: GateConfig) -> str:
    """What `gate.data` calls what a run was trained on, by its config and last checkpoint."""
    source = load_saved(path / "config.yaml").data.source
    return data_label(gate, source, fingerprints(path)["data"])


def sets_of(gate: GateConfig) -> list[str]:
    """The named evaluation sets that the checks of a gate are of."""
    return list(dict.fromkeys(check.set for check in gate.checks if check.set))


def _records(path: Path, run: RunConfig) -> tuple[int, int]:
    """How many records metrics.jsonl lacks or has twice, and how many losses are not finite."""
    records = read_metrics(path / "metrics.jsonl", "train")
    every, last = run.train.log_every_steps, run.train.total_steps
    wanted = sorted({*range(every, last + 1, every), last})
    logged = {record["step"] for record in records}
    evaluated = [record["step"] for record in read_metrics(path / "metrics.jsonl", "eval")]
    doubled = len(records) - len(logged) + len(evaluated) - len(set(evaluated))
    missing = len(logged.symmetric_difference(wanted)) + doubled
    return missing, sum(not math.isfinite(value_of(record, "loss")) for record in records)


def _export_differences(run: RunConfig, learner: Learner, export: Path) -> Measured:
    """Tensors of the export that are not the checkpoint's, bit for bit."""
    if not run.features.qk_norm:
        return NotMeasured("without features.qk_norm there is no such architecture to export")
    try:
        differing = differing_tensors(learner.buffers, export)
    except UsageError as error:
        return Failed(str(error))
    return Explained(len(differing), ", ".join(differing[:3]))


def _loss_on(name: str, run: RunConfig, learner: Learner, out: Path) -> Measured:
    """The loss on a named set, made as the package's conf/eval says."""
    chosen = official(run.name, f"eval={name}").eval
    try:
        found = open_eval_set(chosen, cache_dir=data_cache(out) / "eval")
    except UsageError as error:
        return NotMeasured(str(error))
    return measure_on_set(run, learner, found)["loss"]


def _defects(name: str, of_config) -> tuple[Defect, ...]:
    stated = read_tree(file_of("run", name))

    def one_layer_more():
        layers = official(name).model.num_hidden_layers + 1
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
    sound = official

    def altered(wanted: str, *overrides: str) -> RunConfig:
        run = sound(wanted, *overrides)
        if wanted != name:
            return run
        return replace(run, **{k: replace(getattr(run, k), **v) for k, v in parts.items()})

    return mock.patch(f"{__name__}.official", altered)
