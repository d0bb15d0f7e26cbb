"""`xtrain-prune [--delete] [--out DIR]`: give back the disk that checkpoints of old runs hold.

What is kept: every run that was promoted, every one that has not FINISHED (`resume=auto` goes on
from its checkpoint), the newest finished one of each run and phase (`xtrain-gate NAME` measures
it), and of all runs the records, the configuration and the export. Without --delete it only says
what it would delete. Exit codes: 0 done, 1 internal error, 2 usage.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from gates.judging.ledger import Ledger
from gates.judging.promote import decisions
from xtrain.command.ending import run_command
from xtrain.command.streams import shown
from xtrain.errors import UsageError, write_error
from xtrain.track.resume import is_alive
from xtrain.track.run_dir import RunDir, all_runs

PROGRAM = "xtrain-prune"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    return run_command(PROGRAM, _main, arguments)


def prunable(root: Path) -> list[RunDir]:
    """The runs whose checkpoints nothing needs any more, oldest first.

    Raises UsageError when the ledger does not hold: then nobody can tell what was promoted.
    """
    ledger = Ledger.of(root)
    broken = ledger.verify()
    if broken:
        raise UsageError(f"{broken}; what was promoted cannot be told, so nothing is deleted")
    newest, found = {}, []
    for run in all_runs(root):
        if run.manifest["status"] == "FINISHED" and not is_alive(run):
            newest[run.manifest["run"], run.manifest["phase"]] = run.id
            found.append(run)
    return [
        run
        for run in found
        if newest[run.manifest["run"], run.manifest["phase"]] != run.id
        and not _was_promoted(run, ledger)
        and (run.path / "checkpoints").is_dir()
    ]


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.partition("\n\n")[2])
    parser.add_argument("--out", default="outputs", type=Path, metavar="DIR", help="outputs root")
    parser.add_argument("--delete", action="store_true", help="delete, rather than say what")
    options = parser.parse_args(arguments)
    total = 0
    for run in prunable(options.out):
        directory = run.path / "checkpoints"
        size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        total += size
        if options.delete:
            _delete(directory)
        print(shown(f"{'deleted' if options.delete else 'would delete'} {directory}: {_mb(size)}"))
    print(f"{_mb(total)} in all" + ("" if options.delete or not total else "; --delete deletes"))
    return 0


def _delete(directory: Path) -> None:
    if directory.is_symlink():
        raise UsageError(f"{directory} is a link to elsewhere: delete it yourself")
    try:
        shutil.rmtree(directory)
    except OSError as error:
        raise write_error(directory, error) from error


def _was_promoted(run: RunDir, ledger: Ledger) -> bool:
    """Whether it was at any time: what a later refusal says does not make its weights worthless."""
    known = decisions(ledger, run.manifest["run"])
    return any(each["id"] == run.id and each["verdict"] == "PASS" for each in known)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


if __name__ == "__main__":
    import sys

    sys.exit(main())
