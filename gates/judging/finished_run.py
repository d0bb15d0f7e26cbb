"""The verdict on a run that has just been trained: its own gate, and the gates that it requires.

A run whose file is here, a run of a further directory and a run under a name of its own are judged
by this one function, and each verdict is bound to the code that measured it: that of the run's own
gate file, if it has one, else of `gates/trained_run.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gates.judging.find import HERE, choose_gates, find_gates
from gates.judging.fingerprint import code_fingerprint
from gates.judging.judge import CheckResult, judge, verdict_on
from gates.judging.ledger import Ledger
from gates.judging.measure import Report, Setting, Standing, record, settle
from gates.judging.outlook import missing_gates, no_bar_on_loss
from gates.trained_run import fingerprints, label_of, measure_run, sets_of
from xtrain.config.bars import (
    gate_checks,
    run_gate,
    whose_bars,
    without_checks_of_other_data,
)
from xtrain.config.files import file_of
from xtrain.config.schema import RunConfig

Say = Callable[[str], None]


@dataclass(frozen=True)
class Finished:
    """A finished run as it was judged and recorded.

    fingerprint: of its code, config, data, checkpoint and export. bars: whose they were. beside:
    what refuses it beside its checks, a reason each. requires: the gates that it names.
    """

    device: str
    results: Sequence[CheckResult]
    fingerprint: Mapping[str, str]
    bars: str
    beside: Sequence[str]
    requires: Sequence[str]

    @property
    def verdict(self) -> str:
        """The worst of its own checks that can be measured on its device class."""
        return verdict_on(self.device, self.results)


def setting_of(run: RunConfig) -> Setting:
    """Where a run's gates are measured: on its device, beside its outputs, by the bars of conf/."""
    return Setting(run.device, Path(run.out), Ledger.of(run.out), gate_checks)


def judge_run(run: RunConfig, path: Path, setting: Setting) -> Finished:
    """Measure a run again from its last checkpoint, judge it and append the verdict to the ledger.

    What measuring raises passes through: the command that trained the run ends by it.
    """
    gate = run_gate(run)
    label = label_of(path, gate)
    applying = without_checks_of_other_data(gate, label)
    measured = measure_run(path, setting.device, setting.out, sets_of(applying))
    report = Report(
        run.name,
        gate.title,
        setting.device,
        {**fingerprints(path), "code": _code_of(run, setting.device)},
        judge(applying.checks, measured, setting.device),
        bars=whose_bars(run),
    )
    record(report, setting)
    beside = [*no_bar_on_loss(run, gate, label), *missing_gates(gate)]
    return Finished(
        setting.device, report.results, report.fingerprint, report.bars, beside, gate.requires
    )


def settle_required(judged: Finished, setting: Setting, say: Say) -> dict[str, Standing]:
    """What stands for each gate that a run requires; nothing is measured for a refused run."""
    wanted = [] if judged.beside else judged.requires
    return settle(choose_gates(wanted, find_gates()), setting, say)


def settle_phase(name: str, setting: Setting, say: Say) -> dict[str, Standing] | None:
    """What stands for the gate of a phase, None when there is no such gate here."""
    files = find_gates()
    return settle([files[name]], setting, say) if name in files else None


def _code_of(run: RunConfig, device: str) -> str:
    """The fingerprint of the code that measures a run; of config files those that there are."""
    file = find_gates().get(run.name)
    if file is not None:
        return code_fingerprint(file.path, file.load().composes, device=device)
    composes = [f"run/{run.parent}"] if run.parent and file_of("run", run.parent) else []
    return code_fingerprint(HERE / "trained_run.py", composes, device=device)
