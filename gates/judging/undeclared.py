"""In how many axes a run differs from its parent undeclared, known before any training."""

from gates.judging.gate import Explained, NotMeasured
from xtrain.config.bars import official
from xtrain.config.identity import undeclared_differences
from xtrain.config.schema import RunConfig
from xtrain.errors import UsageError


def undeclared_axes(run: RunConfig) -> float | NotMeasured:
    """How many axes differ from the parent's undeclared; NotMeasured when there is no such file."""
    if run.parent is None:
        return 0.0
    try:
        found = undeclared_differences(run, official(run.parent))
    except UsageError as error:
        return NotMeasured(f"parent={run.parent}: {error}")
    keys = (f"{axis} ({', '.join(keys)})" for axis, keys in found.items())
    return Explained(len(found), f"differs from {run.parent} in {', '.join(keys)}")
