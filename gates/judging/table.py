"""Tables of checks for a terminal or a file: plain text is never wrapped, numbers never cut."""

from collections.abc import Iterable, Sequence

from gates.judging.judge import ERROR, FAIL, NOT_MEASURED, PASS, STALE, CheckResult
from xtrain.command.streams import shown
from xtrain.config.check import Check

_STYLES = {PASS: "green", FAIL: "bold red", ERROR: "bold red", STALE: "yellow", NOT_MEASURED: "dim"}

_FOLDING = ("check", "original", "why", "claim", "defect", "measures", "bars")


def check_rows(results: Iterable[CheckResult], gate: str = "") -> list[list[str]]:
    """Rows of gate, check, measured, bar, original, verdict, why."""
    return [
        [
            gate,
            result.check.name,
            show_value(result.value, result.check.unit),
            show_bar(result.check),
            result.check.original,
            result.verdict,
            result.reason,
        ]
        for result in results
    ]


CHECK_COLUMNS = ("gate", "check", "measured", "bar", "original", "verdict", "why")


def show_value(value: float | None, unit: str = "") -> str:
    """A value in six digits, a whole number in all of its own, with its unit; "-" for none."""
    return "-" if value is None else f"{_digits(value)} {unit}".rstrip()


def show_bar(check: Check) -> str:
    """The bar with its op, `reported` for a number without one."""
    return f"{check.op} {_digits(check.bar)}" if check.is_judged else check.op


def _digits(value: float) -> str:
    is_count = float(value).is_integer() and abs(value) < 1e15
    return str(int(value)) if is_count else f"{value:.6g}"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print on stdout; a column without any text is left out.

    On a narrow terminal prose folds, and what remains too wide runs over rather than being cut.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    table = Table(box=None, pad_edge=False)
    for i in used:
        table.add_column(columns[i], no_wrap=columns[i] not in _FOLDING, overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(row[i]), style=_STYLES.get(row[i], "")) for i in used))
    console = Console(highlight=False)
    unbounded = console.options.update(width=100_000, max_width=100_000)
    natural = console.measure(table, options=unbounded)
    if console.is_terminal:
        console.width = max(console.width, natural.minimum)
        console.print(table)
        return
    console.width = max(1, natural.maximum)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
