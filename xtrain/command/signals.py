"""SIGINT, SIGTERM and SIGHUP, from the first line of a command to its last.

    leaving   nothing has been written: one line and the exit code at once, in whatever code it is
    raising   Interrupted is raised where the command is, so that it cleans up
    noting    the signal is kept for who asks, between two steps; a second one acts as outside

A second signal while a command cleans up after `raising` ends it at once. The exit code is 128 +
the number: 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP (the terminal was closed). What was ignored when the
command started, as under nohup, stays ignored.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from xtrain.errors import Interrupted

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def leaving(program: str) -> Iterator[None]:
    """End the process at a signal. What Python code a signal falls into may swallow exceptions."""
    with _handled(lambda number, frame: _leave(program, number)):
        yield


@contextmanager
def raising(program: str, last_words: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Raise Interrupted at the first signal; at the second call last_words and end the process."""

    def second(number: int, frame: object) -> None:
        try:
            last_words()
        finally:
            _leave(program, number)

    def first(number: int, frame: object) -> None:
        for each in _watched():
            signal.signal(each, second)
        raise Interrupted(number)

    with _handled(first):
        yield


@contextmanager
def noting() -> Iterator[Callable[[], int | None]]:
    """Give a function that returns the number of the signal that arrived, or None.

    One that nobody acted on raises Interrupted at the end.
    """
    arrived: list[int] = []
    outside = {number: signal.getsignal(number) for number in WATCHED}

    def note(number: int, frame: object) -> None:
        arrived.append(number)
        for each in _watched():
            signal.signal(each, outside[each])

    with _handled(note):
        yield lambda: arrived[0] if arrived else None
    if arrived:
        raise Interrupted(arrived[0])


@contextmanager
def _handled(handler: Callable[[int, object], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python gives signals to the main thread only
        return
    before = {number: signal.getsignal(number) for number in _watched()}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _watched() -> list[int]:
    return [n for n in WATCHED if signal.getsignal(n) not in (signal.SIG_IGN, None)]


def _leave(program: str, number: int) -> None:
    try:
        os.write(2, f"{program}: {Interrupted(number)}\n".encode())
    finally:
        os._exit(128 + number)
