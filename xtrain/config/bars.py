"""The bars of phases, runs and other gates: where they stand, whose they are, for which data.

Bars are read from files, never from a composed tree, so that no override and no directory of one's
own reaches those of the package: under a name that the package has, the package's file counts. A
bar on a loss belongs to the data that it was found on, by source and fingerprint (`gate.data` of
the run's file); what the data are called decides nothing.
"""

import dataclasses

from xtrain.config.check import Check
from xtrain.config.compose import compose, load_run, read_part
from xtrain.config.files import choices, conf_dir, file_of, is_of_package, package_conf_dir
from xtrain.config.schema import GateConfig, KnownData, PhaseConfig, RunConfig
from xtrain.errors import UsageError

ANY_DATA = "any"
OTHER_DATA = ""  # the data of a run on which no bar was found
# Values that say how well a model has learnt: without a bar on one of them nothing is promoted.
OF_LOSS = ("val_loss", "margin_over_unigram_nats")
LOSS_ON_SET = "_loss"  # ends the name of a loss on a named evaluation set


def gate_checks(name: str, data: str | None = None) -> tuple[list[Check], str, str]:
    """Checks, title and claim of a phase (t13), run (v9) or other gate (e1), from its file only.

    data: what `gate.data` calls what was trained on, which leaves out the checks of other data.
    Raises UsageError for an unknown name.
    """
    name = name.lower()
    if phase := file_of("phase", name):
        spec = read_part(PhaseConfig, phase, "phase")
    elif file_of("run", name):
        spec = gate_of_file(name)
    elif gate := file_of("gate", name):
        spec = read_part(GateConfig, gate)
    else:
        known = [*choices("phase"), *choices("run"), *choices("gate")]
        raise UsageError(f"{name} is no phase, run or gate; there are {', '.join(known)}")
    return for_data(spec.checks, data), spec.title, spec.claim


def run_gate(run: RunConfig) -> GateConfig:
    """What this run must show, on whatever data.

    The gate of its file; a run of a further directory, which has no file here, brings its own.
    """
    gate = gate_of_file(run.name) if file_of("run", run.name) else run.gate
    _check_labels(gate, run.name)
    return gate


def gate_of_file(name: str) -> GateConfig:
    """The gate that stands in the file of a run."""
    return read_part(GateConfig, file_of("run", name), "gate")


def whose_bars(run: RunConfig) -> str:
    """Whose bars judge a run, for its verdict: the package's, or the file's of one's own."""
    if is_of_package("run", run.name):
        return f"of the package, conf/run/{run.name}.yaml"
    own = file_of("run", run.name)
    return f"of one's own, {own}" if own else "of one's own, with the run"


def known_data(gate: GateConfig, source: str, fingerprint: str) -> KnownData | None:
    """What the gate's file states of data with that fingerprint, None when it knows none such."""
    for known in gate.data:
        if (known.source, known.fingerprint) == (source, fingerprint):
            return known
    return None


def data_label(gate: GateConfig, source: str, fingerprint: str) -> str:
    """What the checks of the gate's file call these data, OTHER_DATA when it knows none such."""
    known = known_data(gate, source, fingerprint)
    return OTHER_DATA if known is None else known.name


def are_shards_of(known: KnownData, train_sha256: str, heldout_sha256: str) -> bool:
    """Whether the shards are those of the data, as far as the file states them."""
    stated = (known.train_sha256, known.heldout_sha256)
    found = (train_sha256, heldout_sha256)
    return all(wanted in ("", each) for wanted, each in zip(stated, found, strict=True))


def for_data(checks: list[Check], data: str | None) -> list[Check]:
    """The checks that apply to data of that label; None: all."""
    return [check for check in checks if data is None or check.data in (ANY_DATA, data)]


def is_of_loss(check: Check) -> bool:
    """Whether the check bounds a loss, on held-out text or on a named set."""
    return check.name in OF_LOSS or bool(check.set)


def official(name: str, *overrides: str) -> RunConfig:
    """A run as the file on which verdicts rest has it. Raises UsageError for an unknown name."""
    conf = package_conf_dir() if is_of_package("run", name) else conf_dir()
    return load_run(compose([f"run={name}", *overrides], conf=conf))


def _check_labels(gate: GateConfig, name: str) -> None:
    names = [known.name for known in gate.data]
    for check in gate.checks:
        if check.data != ANY_DATA and check.data not in names:
            raise UsageError(
                f"run {name}: check {check.name} is of data={check.data}, which gate.data of its "
                f"file does not state ({', '.join(names) or 'it states none'})"
            )


def without_checks_of_other_data(gate: GateConfig, data: str) -> GateConfig:
    """The gate as it applies to data of that label."""
    return dataclasses.replace(gate, checks=for_data(gate.checks, data))
