"""SIGINT and SIGTERM end a run between two steps, checkpoint saved; a second ends it at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WATCHED = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def watch_signals() -> Iterator[Callable[[], int | None]]:
    """Give a function that returns the number of the signal that arrived, or None."""
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in WATCHED}

    def note(number: int, frame: object) -> None:
        arrived.append(number)
        signal.signal(number, before[number])

    for number in WATCHED:
        signal.signal(number, note)
    try:
        yield lambda: arrived[0] if arrived else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
