"""What a gate is: measurements that return numbers, and defects that those numbers must expose.

A gate file is `gates/<id>_<slug>.py` with one module-level GATE. It measures only: the bars stand
in `conf/phase/<id>.yaml` or `conf/run/<id>.yaml` and `gates.judging.judge` compares. Keep this
file to the declarations, because it is part of every gate's code fingerprint.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NotMeasured:
    """A value that cannot be had here (no GPU, no peer installed); the reason is one line."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """A value whose measurement raised; the reason is the exception in one line."""

    reason: str


class Explained(float):
    """A value with a line that says what is behind it, shown when it misses its bar."""

    def __new__(cls, value: float, why: str) -> "Explained":
        explained = super().__new__(cls, value)
        explained.why = why
        return explained


Measured = float | NotMeasured | Failed
Measure = Callable[[str], Mapping[str, float | NotMeasured]]
RunMeasure = Callable[[str, Path], Mapping[str, float | NotMeasured]]


@dataclass(frozen=True)
class Defect:
    """A seeded fault: inside `patch()`, `measure(device)` must miss the bar of check `rejects`."""

    name: str
    rejects: str
    measure: Measure
    patch: Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class Gate:
    """The measurements of one phase or run, or of a gate that is neither.

    measures: each is called with the device class (`cpu`, `cuda`), returns values by check name.
    run_measures: the same for what reads a trained run; called with (device class, outputs root).
    defects: at least one, or `--prove` fails.
    composes: configs that the measurements compose, e.g. `model/v0`; part of the code fingerprint.
    artifact: (device class, outputs root) -> fingerprints of what was judged, by `config`, `data`,
    `checkpoint`; for gates of runs. trained_on: likewise -> name of the data config, which chooses
    the checks; None when there is no run yet.
    """

    id: str
    title: str
    measures: tuple[Measure, ...] = ()
    defects: tuple[Defect, ...] = ()
    composes: tuple[str, ...] = ()
    run_measures: tuple[RunMeasure, ...] = ()
    artifact: Callable[[str, Path], Mapping[str, str]] | None = None
    trained_on: Callable[[str, Path], str | None] | None = None
