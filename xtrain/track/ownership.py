"""Whose a run directory is now: of the process that holds the lock on the file `.lock` in it.

The kernel lets go of the lock when the process ends, however it ends, so that nothing has to be
believed about host names and process ids, which change when a container is started again. Where a
file system has no locks (some network file systems), `acquire` says so by returning None and
`is_held` answers None: then only a process of this very host can be asked for.

The lock is `flock`'s: on NFS it holds between hosts, unless the mount says `local_lock` or
`nolock`.
"""

import errno
import fcntl
import os
import time
from pathlib import Path

from xtrain.errors import UsageError

NAME = ".lock"
# A process that asks `is_held` has the lock for an instant, which is no reason to give up.
_PATIENCE_S = 2.0
_ASK_AGAIN_S = 0.02
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def acquire(directory: Path) -> int | None:
    """Hold a run directory until the descriptor is closed; None where there are no locks.

    Raises UsageError when another process holds it, and OSError when nothing can be written there.
    """
    descriptor = os.open(directory / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while (locked := _lock(descriptor, fcntl.LOCK_EX)) is False:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{directory} is RUNNING in another process; wait for it, or stop it"
                )
            time.sleep(_ASK_AGAIN_S)
    except BaseException:
        os.close(descriptor)
        raise
    if locked:
        return descriptor
    os.close(descriptor)
    return None


def is_held(directory: Path) -> bool | None:
    """Whether a process, this one too, holds a run directory; None where there are no locks."""
    try:
        descriptor = os.open(directory / NAME, os.O_RDONLY)
    except OSError:
        return False  # nobody has ever held it
    try:
        locked = _lock(descriptor, fcntl.LOCK_SH)
        return None if locked is None else not locked
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool | None:
    """Whether the lock was got at once; None where there are none."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True
