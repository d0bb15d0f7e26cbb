"""The ways a run ends early that are not bugs."""


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
    """A file of a run could not be written (disk full, permission); the message is one line."""


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived and a complete checkpoint was kept (exit code 128 + signal)."""

    def __init__(self, signal: int):
        super().__init__(f"interrupted by signal {signal}")
        self.signal = signal
