"""`python -m tests.mutants`: plant each fault in a copy of the project and see who notices.

    python -m tests.mutants                   all mutants that have no result yet
    python -m tests.mutants --only loop.py    those whose name holds the text
    python -m tests.mutants --gates           the gates too, where a mutant names one
    python -m tests.mutants --list            what has been found so far, and what has not been run
    python -m tests.mutants --table FILE      write the table of results into a Markdown file

Results are kept in .mutants.json, each with the sha256 of the two files it rests on, so a run that
was broken off goes on where it was, and a change of a file makes its mutants due again. The fast
test must pass without the fault and fail with it; so must the bars of the gate's measure. Exit code
0: every mutant that ran was caught; 1: one was not, or could not be told.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from .results import CAUGHT, Results
from .sandbox import Sandbox
from .table import MUTANTS
from .write_table import write_table

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    results = Results(ROOT, options.results)
    chosen = [m for m in MUTANTS if options.only in m.name]
    if options.table:
        write_table(options.table, MUTANTS, results)
        return 0
    if options.list:
        for mutant in chosen:
            found = results.of(mutant)
            print(f"{found.get('test', '-'):10} {found.get('gate', '-'):10} {mutant.name}")
        return 0
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        sandbox = Sandbox(ROOT, Path(folder) / "project", options.timeout)
        for number, mutant in enumerate(chosen, 1):
            for kind in ("test", "gate") if options.gates else ("test",):
                if kind in results.of(mutant) or not getattr(mutant, kind):
                    continue
                verdict = sandbox.verdict(mutant, kind)
                results.add(mutant, kind, verdict)
                missed += verdict != CAUGHT
                print(f"{number}/{len(chosen)} {kind} {verdict}: {mutant.name}", flush=True)
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose name holds it")
    parser.add_argument("--gates", action="store_true", help="ask the gates, too")
    parser.add_argument("--list", action="store_true", help="show results, run nothing")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table into a file")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="of one test")
    parser.add_argument("--results", type=Path, default=ROOT / ".mutants.json", metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
