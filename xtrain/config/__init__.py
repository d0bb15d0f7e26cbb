"""Configuration: the only part of xtrain, besides pipelines, that knows Hydra.

schema.py    the types of every key
compose.py   YAML and overrides -> RunConfig; a gate's bars from its file
rules.py     which values make sense, what each device can do
identity.py  fingerprint and axes
messages.py  Hydra's refusals in one line
"""

from xtrain.config.compose import (
    compose,
    gate_checks,
    load_run,
    load_saved,
    read_tree,
    resolved_yaml,
    run_gate,
)
from xtrain.config.identity import (
    BOOKKEEPING,
    axes_differing,
    axis_differences,
    config_fingerprint,
    flatten,
    flatten_tree,
    undeclared_differences,
)
from xtrain.config.rules import check_features, resolve_features
from xtrain.config.schema import Features, GateConfig, PhaseConfig, RunConfig

__all__ = [
    "BOOKKEEPING",
    "Features",
    "GateConfig",
    "PhaseConfig",
    "RunConfig",
    "axes_differing",
    "axis_differences",
    "check_features",
    "compose",
    "config_fingerprint",
    "flatten",
    "flatten_tree",
    "gate_checks",
    "load_run",
    "load_saved",
    "read_tree",
    "resolve_features",
    "resolved_yaml",
    "run_gate",
    "undeclared_differences",
]
