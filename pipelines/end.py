"""How a run ended, said on the disk and to MLflow, whatever hinders either."""

from collections.abc import Callable

from xtrain.command.signals import noting
from xtrain.track.mirror import Mirror
from xtrain.track.run_dir import RunDir


def end_run(out: RunDir, mirror: Mirror | None, ended: str, say: Callable[[str], None]) -> None:
    """Mark a run FINISHED, FAILED or KILLED, complete its MLflow copy and let go of it.

    What hinders one does not hinder the other, and is said, not raised: the reason of the end is.
    """
    try:
        with noting():  # a signal waits the milliseconds that this takes
            out.set_status(ended)
    except OSError as error:
        say(f"the run could not be marked {ended}: {error}")
    finally:
        behind = _close(mirror, ended) if mirror is not None else ""
        out.close()
        if behind:
            say(behind)


def _close(mirror: Mirror, ended: str) -> str:
    try:
        return mirror.close(ended)
    except OSError as error:
        return f"MLflow is behind: {error}"
