"""The table of mutants in a Markdown file, between two marks."""

from collections.abc import Sequence
from pathlib import Path

from .mutant import Mutant
from .results import Results

BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
NOT_RUN = "not run"


def write_table(file: Path, mutants: Sequence[Mutant], results: Results) -> None:
    """Replace what stands between the marks, or append the marks with the table."""
    table = f"{BEGIN}\n{_table(mutants, results)}\n{END}\n"
    text = file.read_text() if file.exists() else ""
    if BEGIN in text and END in text:
        before, _, rest = text.partition(BEGIN)
        text = before + table + rest.partition(END)[2].lstrip("\n")
    else:
        text = f"{text}\n{table}" if text else table
    file.write_text(text)


def _table(mutants: Sequence[Mutant], results: Results) -> str:
    rows = ["| file | line | instead | fast test | found | gate | found |", "|" + "---|" * 7]
    for mutant in mutants:
        found = results.of(mutant)
        gate = mutant.gate.replace(":", " ").upper().partition(" ")[0] if mutant.gate else ""
        asked = found.get("gate", NOT_RUN) if mutant.gate else ""
        cells = (
            mutant.file,
            _code(mutant.old),
            _code(mutant.new),
            _test(mutant.test),
            found.get("test", NOT_RUN),
            gate,
            asked,
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _code(text: str) -> str:
    return "`" + " ".join(text.split()).replace("|", "\\|") + "`"


def _test(node: str) -> str:
    return node.removeprefix("tests/").replace(".py::", " ").replace("_", "\\_")
