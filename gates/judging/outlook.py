"""What already says, before the first step, that a run will not be promoted.

The same reasons refuse it at the end: nothing here is a forecast of what is measured. Imports stay
light, because a dry run asks too.
"""

from gates.judging.find import find_gates
from gates.judging.gate import NotMeasured
from gates.judging.undeclared import undeclared_axes
from xtrain.config.bars import OTHER_DATA, data_label, for_data, is_of_loss, official, run_gate
from xtrain.config.files import file_of
from xtrain.config.identity import changed_terms
from xtrain.config.schema import GateConfig, RunConfig
from xtrain.data.dataset import data_fingerprint
from xtrain.errors import UsageError

PROMOTING = "pretrain"  # the phase whose runs are promoted


def outlook(run: RunConfig) -> list[str]:
    """Every reason known from the configuration, a phrase each; [] when there is none."""
    gate = run_gate(run)
    stated = official(run.name) if file_of("run", run.name) else run
    changed = changed_terms(run, stated)
    reasons = [f"{', '.join(changed)}: not as in the run's file"] if changed else []
    undeclared = undeclared_axes(run)
    if isinstance(undeclared, NotMeasured):
        reasons.append(undeclared.reason)
    elif undeclared:
        reasons.append(undeclared.why)
    try:
        label = data_label(gate, run.data.source, data_fingerprint(run.data))
    except UsageError as error:
        return [*reasons, str(error), *missing_gates(gate)]
    return [*reasons, *no_bar_on_loss(run, gate, label), *missing_gates(gate)]


def no_bar_on_loss(run: RunConfig, gate: GateConfig, label: str) -> list[str]:
    """The reason, if no check of a loss applies to data of that label."""
    if any(is_of_loss(check) and check.is_judged for check in for_data(gate.checks, label)):
        return []
    known = [each.name for each in gate.data]
    what = f"data.name={run.data.name}" if label == OTHER_DATA else f"data={label}"
    of = f"; its bars are of {', '.join(known)} as in its file" if known else ""
    return [f"run {run.name} has no bar on a loss of these data ({what}){of}"]


def missing_gates(gate: GateConfig) -> list[str]:
    """A reason for each gate that the run requires and that does not exist."""
    there = find_gates()
    return [
        f"gate {name} is required and there is no such gate yet"
        for name in gate.requires
        if name.lower() not in there
    ]
