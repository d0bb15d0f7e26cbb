"""The one judge: a pure function from bars and measured values to verdicts.

    judge(checks, measured, device) -> one CheckResult a check, in the order of the checks

A missing, NaN or infinite value is FAIL with the reason, never a pass; a check of another device
class is NOT MEASURED; a measurement that raised is ERROR; a finite number without a bar is REPORTED
and counts neither for nor against. Nothing here reads a file or a clock.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gates.judging.gate import Explained, Failed, Measured, NotMeasured
from xtrain.config.check import Check

PASS = "PASS"
FAIL = "FAIL"
ERROR = "ERROR"
NOT_MEASURED = "NOT MEASURED"
STALE = "STALE"
REPORTED = "REPORTED"

# The verdict of several checks is the worst of theirs, in this order.
_WORST_FIRST = (ERROR, FAIL, STALE, NOT_MEASURED, PASS)


@dataclass(frozen=True)
class CheckResult:
    """A check, the value measured for it (None when there is none), the verdict and its reason."""

    check: Check
    value: float | None
    verdict: str
    reason: str = ""


def judge(
    checks: Sequence[Check], measured: Mapping[str, Measured], device: str
) -> list[CheckResult]:
    """Judge each check by the value of its name; `device` is the class measured on."""
    return [_judge_one(check, measured.get(check.name), device) for check in checks]


def verdict_of(results: Iterable[CheckResult]) -> str:
    """The worst verdict; no checks at all is NOT MEASURED, because nothing was shown."""
    verdicts = {result.verdict for result in results}
    return next((verdict for verdict in _WORST_FIRST if verdict in verdicts), NOT_MEASURED)


def verdict_on(device: str, results: Iterable[CheckResult]) -> str:
    """The verdict over the checks that can be measured on this device class at all."""
    return verdict_of(result for result in results if result.check.applies_to(device))


def _judge_one(check: Check, value: Measured | None, device: str) -> CheckResult:
    if not check.applies_to(device):
        return CheckResult(check, None, NOT_MEASURED, f"needs device={check.device}")
    if value is None:
        return CheckResult(check, None, FAIL, "no value was measured")
    if isinstance(value, NotMeasured):
        return CheckResult(check, None, NOT_MEASURED, value.reason)
    if isinstance(value, Failed):
        return CheckResult(check, None, ERROR, value.reason)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return CheckResult(check, None, FAIL, f"{value!r} is not a number")
    if not math.isfinite(number):
        return CheckResult(check, number, FAIL, f"the value is {number}")
    if not check.is_judged:
        return CheckResult(check, number, REPORTED)
    if check.is_met_by(number):
        return CheckResult(check, number, PASS)
    why = f": {value.why}" if isinstance(value, Explained) and value.why else ""
    return CheckResult(check, number, FAIL, f"not {check.op} {check.bar:g}{why}")
