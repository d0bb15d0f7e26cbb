"""Tables of checks for a terminal or a file: plain text is never wrapped, numbers never cut."""

from collections.abc import Iterable, Sequence

from gates.judge import ERROR, FAIL, NOT_MEASURED, PASS, STALE, CheckResult

_STYLES = {PASS: "green", FAIL: "bold red", ERROR: "bold red", STALE: "yellow", NOT_MEASURED: "dim"}


def check_rows(results: Iterable[CheckResult], gate: str = "") -> list[list[str]]:
    """Rows of gate, check, measured, bar, original, verdict, why."""
    return [
        [
            gate,
            result.check.name,
            show_value(result.value, result.check.unit),
            f"{result.check.op} {result.check.bar:g}",
            result.check.original,
            result.verdict,
            result.reason,
        ]
        for result in results
    ]


CHECK_COLUMNS = ("gate", "check", "measured", "bar", "original", "verdict", "why")


def show_value(value: float | None, unit: str = "") -> str:
    """A measured value in six digits with its unit; "-" for none."""
    return "-" if value is None else f"{value:.6g} {unit}".rstrip()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print on stdout; a column without any text is left out."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    table = Table(box=None, pad_edge=False, title=title or None, title_justify="left")
    for i in used:
        is_prose = columns[i] in ("why", "claim")
        table.add_column(columns[i], no_wrap=not is_prose, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[i], style=_STYLES.get(row[i], "")) for i in used))
    console = Console(highlight=False)
    if not console.is_terminal:
        unbounded = console.options.update(width=100_000, max_width=100_000)
        console.width = max(1, console.measure(table, options=unbounded).maximum)
    console.print(table)
