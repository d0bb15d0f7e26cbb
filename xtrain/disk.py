"""What must be on the disk before the next thing is written."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make the content of a file, or what was made and renamed in a directory, survive a power cut.

    Raises OSError when the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
