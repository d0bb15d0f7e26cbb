"""What makes two runs the same, and in which axes they differ.

A fingerprint covers what decides the training values. An axis is one of the four columns of the
evolution ledger; a run may differ from its parent only in the axes that it names, so that a
difference in loss has one known cause.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping

from xtrain.config.rules import AXES, best_features
from xtrain.config.schema import RunConfig

# How a run is kept, shown and judged; none of these changes a training value.
BOOKKEEPING = (
    "out",
    "resume",
    "promote",
    "dry_run",
    "parent",
    "axes",
    "gate.",
    "phase.title",
    "phase.claim",
    "phase.checks",
    "phase.device_classes",
    "train.keep_last",
    "train.log_every_steps",
    "train.save_every_steps",
    "train.sample_tokens",
    "train.prompts",
    "data.name",
    "data.workers",
    "decode.",
    "eval.",
    "prompt",
)

# Longest prefix wins. None: not an axis, because it names, repeats or places the run, or because a
# phase's gate shows that it changes no bit (T7 optimizer and op_sync, T11 pool and capture, T13
# remat). "precision" is the ledger's column of algorithm and precision, so the optimizer is in it.
_AXIS = {
    "model.": "model",
    "features.qk_norm": "model",
    "train.seq_len": "model",
    "init_from": "model",
    "data.": "data",
    "train.max_tokens": "data",
    "train.eval_tokens": "data",
    "features.precision": "precision",
    "optim.": "precision",
    "phase.objective": "precision",
    "train.dropout": "precision",
    "features.": "infra",
    "tokens_per_step": "infra",
    "launch": "infra",
    "device": "infra",
    "features.optimizer": None,
    "features.op_sync": None,
    "features.pool": None,
    "features.capture": None,
    "features.remat": None,
    "train.batch_size": None,
    "train.accumulation": None,
    "train.eval_every_steps": None,
    "phase.name": None,
    "name": None,
    "seed": None,
}
# What the bars of a run's file take for granted: change one, and they are the bars of another run.
# The data are bound by their fingerprint (`xtrain.config.bars`), not by their keys.
TERMS = (
    "model.",
    "features.qk_norm",
    "train.seq_len",
    "train.max_tokens",
    "train.eval_tokens",
    "init_from",
    "data.respect_documents",
    "phase.objective",
    "parent",
    "axes",
)
# Budgets this close count as one: v6 and v8 trained 2.29 and 2.36 billion tokens, about one epoch.
_SAME_BUDGET = 0.05


def flatten(run: RunConfig) -> dict[str, object]:
    """Every value by its dotted key, `train.max_tokens`; a list is one value."""
    return flatten_tree(dataclasses.asdict(run))


def flatten_tree(tree: Mapping, prefix: str = "") -> dict[str, object]:
    """The same of nested mappings, such as a config.yaml that was read back; an empty one stays."""
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten_tree(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def training_values(flat: dict[str, object]) -> dict[str, object]:
    """The part of a flattened run that decides its training values."""
    return {key: value for key, value in flat.items() if not key.startswith(BOOKKEEPING)}


def config_fingerprint(run: RunConfig) -> str:
    """sha256, in hex, of the values that decide the training."""
    text = json.dumps(training_values(flatten(run)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def axis_of(key: str) -> str | None:
    """The axis of a dotted key, or None when it is of none. Raises KeyError for an unknown key."""
    if key.startswith(BOOKKEEPING):
        return None
    prefix = max((prefix for prefix in _AXIS if key.startswith(prefix)), key=len, default=None)
    if prefix is None:
        raise KeyError(f"{key} is in no axis")
    return _AXIS[prefix]


def axis_differences(run: RunConfig, parent: RunConfig) -> dict[str, list[str]]:
    """The differing keys of two runs by axis, in the order of AXES."""
    ours, theirs = _comparable(run), _comparable(parent)
    found: dict[str, list[str]] = {axis: [] for axis in AXES}
    for key, value in ours.items():
        axis = axis_of(key)
        if axis is not None and not _same(key, value, theirs[key]):
            found[axis].append(key)
    return {axis: keys for axis, keys in found.items() if keys}


def axes_differing(run: RunConfig, parent: RunConfig) -> set[str]:
    """The axes in which two runs differ, out of model, data, precision and infra."""
    return set(axis_differences(run, parent))


def undeclared_differences(run: RunConfig, parent: RunConfig) -> dict[str, list[str]]:
    """The differing keys by axis, without the axes that the run declares.

    The parent is taken as it would be on the device of the run, so that where a run is trained is
    no difference, unless the device cannot do what the parent asks for.
    """
    parent = dataclasses.replace(parent, device=run.device)
    if run.device != "auto":
        run, parent = (
            dataclasses.replace(each, features=best_features(each.features, run.device))
            for each in (run, parent)
        )
    differing = axis_differences(run, parent)
    return {axis: keys for axis, keys in differing.items() if axis not in run.axes}


def changed_terms(run: RunConfig, stated: RunConfig) -> list[str]:
    """The keys among TERMS in which a run differs from its file, as it is stated there."""
    ours, theirs = flatten(run), flatten(stated)
    return [key for key in ours if key.startswith(TERMS) and ours[key] != theirs[key]]


def _comparable(run: RunConfig) -> dict[str, object]:
    return {**flatten(run), "tokens_per_step": run.train.tokens_per_step}


def _same(key: str, ours: object, theirs: object) -> bool:
    if key == "train.max_tokens":
        return abs(ours - theirs) <= _SAME_BUDGET * max(ours, theirs)
    return ours == theirs
