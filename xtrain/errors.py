"""The ways a run ends early that are not bugs."""

import errno
import os
import re
from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: "free space, then the same command goes on",
    errno.EDQUOT: "free space or raise the quota, then the same command goes on",
    errno.EROFS: "mount it writable, then the same command goes on",
}


class UsageError(ValueError):
    """Something the user can put right; the message is one line that says how (exit code 2)."""


class OutOfDeviceMemory(UsageError):
    """The GPU's memory is full; the message says how much was asked for and what would fit.

    total_bytes: of the device, 0 when it is not known. Nothing is amiss with what the user typed
    and something may have been written, so the command ends with exit code 1.
    """

    def __init__(self, message: str, total_bytes: int = 0):
        super().__init__(message)
        self.total_bytes = total_bytes


class WriteError(OSError):
    """A file of a run could not be written (disk full, permission); the message is one line.

    kept: what is left of earlier writes, in words.
    """

    def __init__(self, said: str, *, remedy: str = "", kept: str = "", number: int | None = None):
        super().__init__("; ".join(filter(None, (said, kept, remedy))))
        self.errno = number
        self._said, self._remedy = said, remedy

    def keeping(self, kept: str) -> "WriteError":
        """The same with what is kept."""
        return WriteError(self._said, remedy=self._remedy, kept=kept, number=self.errno)


class Interrupted(BaseException):
    """A signal asked for the end (exit code 128 + signal).

    Not an Exception: what catches all that a library may raise must not go on after it.
    """

    def __init__(self, signal: int):
        super().__init__(f"interrupted by signal {signal}")
        self.signal = signal


def write_error(path: Path, error: Exception, kept: str = "") -> WriteError:
    """An OSError or SafetensorError as one line: the file, why, what is kept, what to do."""
    if isinstance(error, WriteError):
        return error.keeping(kept) if kept else error
    number = _number(error)
    reason = os.strerror(number) if number else str(error)
    said, remedy = f"cannot write {path}: {reason}", _REMEDIES.get(number, "")
    return WriteError(said, remedy=remedy, kept=kept, number=number)


def is_of_the_disk(error: BaseException) -> bool:
    """Whether an exception says that the disk is full, over its quota or read-only."""
    return _number(error) in _REMEDIES


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    # safetensors raises its own type, whose text ends in the number that the system gave.
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found and type(error).__name__ == "SafetensorError" else None
