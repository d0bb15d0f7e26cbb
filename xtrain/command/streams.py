"""Standard output and error that no reader, terminal or disk can break a run with.

    sturdy()      within it, what cannot be written is dropped, and the first reason is kept
    shown(text)   text of others, in which nothing commands a terminal

A character that the stream's encoding lacks becomes a replacement. A reader that has gone away
(`| head -1`) or a terminal that was closed is no error: what was asked for is done all the same. A
full disk under stdout is one, said at the end.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# A closed pipe, and a terminal that is no more.
_GONE = (errno.EPIPE, errno.EIO, errno.ECONNRESET, errno.ENXIO)
# Marks that turn the direction of writing, so that a line reads as another one; line separators.
_TURNING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x2028, 0x2029}


class Sturdy:
    """A text stream that goes on without its reader.

    failure: why the first text that was lost could not be written, None while all was.
    """

    def __init__(self, stream):
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    @property
    def reader_is_gone(self) -> bool:
        return self.failure is not None and self.failure.errno in _GONE

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def _attempt(self, function, *arguments) -> None:
        if self.failure is not None:
            return
        try:
            function(*arguments)
        except OSError as error:
            self.failure = error
            _silence(self._stream)
        except ValueError as error:  # closed by whoever started us
            if not self._stream.closed:
                raise
            self.failure = OSError(errno.EPIPE, str(error))


@contextmanager
def sturdy() -> Iterator[tuple[Sturdy, Sturdy]]:
    """Make sys.stdout and sys.stderr sturdy; both are flushed at the end."""
    before = sys.stdout, sys.stderr
    # Python has no stream at all where the caller closed it (`>&-`).
    streams = [stream or open(os.devnull, "w") for stream in before]  # noqa: SIM115
    for stream in streams:
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    wrapped = tuple(Sturdy(stream) for stream in streams)
    sys.stdout, sys.stderr = wrapped
    try:
        yield wrapped
    finally:
        for stream in wrapped:
            stream.flush()
        sys.stdout, sys.stderr = before


def is_lost(stream) -> bool:
    """Whether what is written to a stream goes nowhere any more."""
    return getattr(stream, "failure", None) is not None


def shown(text: str) -> str:
    r"""The text with control characters spelled out (`\x1b`), but for line ends and tabs."""
    return "".join(map(_spelled, text))


def _spelled(character: str) -> str:
    code = ord(character)
    is_control = code < 32 or 127 <= code < 160 or code in _TURNING or 0xD800 <= code < 0xE000
    if not is_control or character in "\n\t":
        return character
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _silence(stream) -> None:
    """Let what is buffered, and whatever Python flushes at its end, go nowhere."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # no file, as in a test
        return
