"""What is said before anything starts: the costs, and why a run will not be promoted.

Imports stay light, because `dry_run=true` does nothing else.
"""

from collections.abc import Sequence

from gates.judging.outlook import PROMOTING, outlook
from xtrain.assemble.estimate import describe
from xtrain.command.streams import shown
from xtrain.config.rules import check_features
from xtrain.config.schema import RunConfig


def look_ahead(run: RunConfig, typed: Sequence[str]) -> int:
    """Compose, count, estimate and say it on stdout; writes nothing, returns 0.

    typed: the overrides as the user wrote them. Raises UsageError as a run that trains would.
    """
    if run.init_from is not None:
        from gates.judging.audit import refuse_foreign
        from gates.judging.ledger import Ledger
        from xtrain.assemble.origin import start_from

        refuse_foreign(run.init_from, Ledger.of(run.out))
        run, _ = start_from(run, typed)
    if run.device != "auto":
        check_features(run, run.device)
    print(shown("\n".join([describe(run), *said_of_promotion(run)])))
    return 0


def said_of_promotion(run: RunConfig) -> list[str]:
    """A line that says why the run will not be promoted, if its configuration tells already."""
    if run.phase.name != PROMOTING or not run.promote:
        return []
    reasons = outlook(run)
    return [f"promotion   will not be promoted, because {'; '.join(reasons)}"] if reasons else []
