"""Prepare the text of a run: tokenise it once, with a bar on a terminal and lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from xtrain.command.streams import shown
from xtrain.data.dataset import DataConfig, Prepared, Progress, prepare

# Elsewhere than on a terminal: one line for so much text.
_LINE_EVERY_BYTES = 1 << 28


def prepare_data(cfg: DataConfig, cache_dir: str | Path, quiet: bool = False) -> Prepared:
    """Return the prepared data of `cfg`; say on stderr how far it is and what came out.

    Raises UsageError as `prepare` does. `quiet` prints nothing.
    """
    with nullcontext() if quiet else _reporting(cfg.name) as progress:
        prepared = prepare(cfg, cache_dir=cache_dir, progress=progress)
    if not quiet:
        print(shown(describe(prepared)), file=sys.stderr)
    return prepared


def describe(prepared: Prepared) -> str:
    """Return one line: tokens and documents of both parts, the fingerprint."""
    parts = [
        f"{prepared.manifest[part]['tokens']:,} tokens in {prepared.manifest[part]['documents']:,} "
        f"documents {purpose}"
        for part, purpose in (("train", "to train on"), ("heldout", "held out"))
    ]
    return f"data {prepared.manifest['name']}: {', '.join(parts)} ({prepared.fingerprint[:12]})"


@contextmanager
def _reporting(name: str) -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield _line_printer(name)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"tokenising {escape(shown(name))}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _line_printer(name: str) -> Progress:
    printed = 0

    def report(done: int, total: int | None) -> None:
        nonlocal printed
        if done - printed >= _LINE_EVERY_BYTES:
            printed = done
            share = f" of {total / 1e6:,.0f}" if total else ""
            print(f"tokenising {shown(name)}: {done / 1e6:,.0f}{share} MB", file=sys.stderr)

    return report
