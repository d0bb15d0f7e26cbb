"""A check: one named number and the bar that it must meet, as it stands in a phase or run file.

The bar is configuration (`conf/phase/t13.yaml`), the number comes from a gate's measurement, and
`gates.judging.judge` compares the two. Both the configuration and the gates import this file, so
it imports neither.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass

from xtrain.errors import UsageError

OPS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
DEVICES = ("any", "cpu", "cuda")
REPORTED = "reported"  # the op of a number that is shown without being judged


@dataclass(frozen=True)
class Check:
    """`name op bar`, e.g. `peak memory ratio <= 0.5`.

    original: what the original xtrain measured, as text. device: `any`, or the only device class on
    which the number exists. data: `any`, or a key of the gate's `data`: the only data for which the
    bar was set (a run trained on other text has other losses). set: the named evaluation set that
    the number is of, conf/eval/NAME.yaml. unit and note are shown beside the number.
    op `reported` has no bar: the number must exist and be finite, and is not judged.
    Raises UsageError for an unknown op or device, or a bar that is not a finite number.
    """

    name: str
    op: str
    bar: float | None = None
    original: str = ""
    device: str = "any"
    data: str = "any"
    set: str = ""
    unit: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.op not in (*OPS, REPORTED):
            known = " ".join((*OPS, REPORTED))
            raise UsageError(f"check {self.name!r}: op={self.op!r}, choose one of {known}")
        if self.device not in DEVICES:
            choices = ", ".join(DEVICES)
            raise UsageError(
                f"check {self.name!r}: device={self.device!r}, choose one of {choices}"
            )
        if self.op == REPORTED:
            if self.bar is not None:
                raise UsageError(f"check {self.name!r}: what is reported has no bar ({self.bar})")
            return
        is_number = isinstance(self.bar, int | float) and not isinstance(self.bar, bool)
        if not is_number or not math.isfinite(self.bar):
            raise UsageError(f"check {self.name!r}: bar={self.bar!r} is not a finite number")

    def is_met_by(self, value: float) -> bool:
        """Whether a finite value meets the bar; one that is only reported has none to miss."""
        return self.op == REPORTED or OPS[self.op](value, self.bar)

    @property
    def is_judged(self) -> bool:
        """Whether there is a bar at all."""
        return self.op != REPORTED

    def applies_to(self, device: str) -> bool:
        """Whether the number can exist on this device class (`cpu` or `cuda`)."""
        return self.device in ("any", device)
