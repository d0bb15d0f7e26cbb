"""`xtrain-gate NAME...`: measure, judge by the bars in conf/, record, and print one table.

Exit codes: 0 every gate PASS (with --prove: every defect rejected), 1 some FAIL or ERROR (or a
defect not rejected), 2 usage, 3 none failed but something is NOT MEASURED or STALE.
"""

import argparse
import sys
from datetime import date
from pathlib import Path

from xtrain.command.ending import run_command
from xtrain.command.signals import raising

PROGRAM = "xtrain-gate"


def main(arguments: list[str] | None = None, **places: object) -> int:
    """Run the command line; return its exit code. places: see `gates.judging.command.run`."""
    return run_command(PROGRAM, _main, arguments, places)


def _main(arguments: list[str] | None, places: dict[str, object]) -> int:
    options = _parser().parse_args(arguments)
    from gates.judging import command

    with raising(PROGRAM):
        return command.run(options, **places)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xtrain-gate",
        description="Measure gates, judge them by the bars in conf/, and record the verdicts. "
        "`audit` compares ledger, MLflow and evidence; `make-key FILE` makes a key to sign with.",
        epilog="exit codes: 0 all PASS, 1 FAIL or ERROR, 2 usage, 3 NOT MEASURED or STALE",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="T13, v0, m1, M2a, all, or audit")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="measure there")
    parser.add_argument("--json", action="store_true", help="print one JSON list and nothing else")
    parser.add_argument("--out", default="outputs", type=Path, metavar="DIR", help="outputs root")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--prove", action="store_true", help="run the seeded defects instead")
    action.add_argument("--list", action="store_true", help="print every gate and its last verdict")
    action.add_argument("--verify-ledger", action="store_true", help="check the hash chain")
    action.add_argument("--waive", metavar="WHY", help="record a waiver; needs --who and --until")
    parser.add_argument("--who", metavar="NAME", help="who waives")
    parser.add_argument("--until", metavar="YYYY-MM-DD", type=date.fromisoformat, help="last day")
    parser.add_argument(
        "--evidence", action="store_true", help="also write gates/evidence/NAME.json, to commit"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
