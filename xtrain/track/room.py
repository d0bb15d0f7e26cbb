"""The memory that this process may hold: of the machine, of its control group, of its own limits.

Each bound is what is free within it and what this process holds already; the smallest counts.
"""

import re
import resource
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

LARGEST = 1 << 60  # more is no limit: control groups of version 1 say 2**63 less a page


@dataclass(frozen=True)
class Room:
    """Bytes that this process may hold, and what bounds them."""

    bytes: int
    bound: str


def room(root: Path = Path("/")) -> Room | None:
    """The tightest bound, None where nothing says one. root: of /proc and /sys."""
    status = _fields(root / "proc/self/status")
    held = status.get("VmRSS", 0)
    found = []
    free = _fields(root / "proc/meminfo").get("MemAvailable")
    if free is not None:
        found.append(Room(held + free, "this machine's memory"))
    for folder in _groups(root):
        found += _of_group(folder, held, root)
    for limit, name, counted in (
        (resource.RLIMIT_AS, "ulimit -v", status.get("VmSize", 0)),
        (resource.RLIMIT_DATA, "ulimit -d", status.get("VmData", 0)),
    ):
        soft = resource.getrlimit(limit)[0]
        if 0 <= soft < LARGEST:  # what is reserved without being used counts there
            found.append(Room(max(held + soft - counted, 0), f"the limit of {name}"))
    return min(found, key=lambda each: each.bytes, default=None)


def _of_group(folder: Path, held: int, root: Path) -> list[Room]:
    """The bound of one control group: its limit and use, without what can be dropped at once."""
    for limit, use, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, used = _number(folder / limit), _number(folder / use)
        if most is not None and used is not None and most < LARGEST:
            spare = _fields(folder / "memory.stat").get(dropped, 0)
            shown = PurePosixPath("/", folder.relative_to(root), limit)
            return [Room(max(held + most - used + spare, 0), f"the limit in {shown}")]
    return []


def _groups(root: Path) -> list[Path]:
    """The folders of this process's control group and of those above it, as far as they are seen.

    In a container its path may be that of the host, of which only the top is there.
    """
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        inside = PurePosixPath(path.lstrip("/"))
        found += [top / each for each in (inside, *inside.parents) if ".." not in each.parts]
    return found


def _fields(path: Path) -> dict[str, int]:
    """`name: 12 kB` or `name 12` a line, in bytes."""
    rows = re.findall(r"^(\w+):?\s+(\d+)( kB)?$", _text(path), re.MULTILINE)
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in rows}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # `max`: no limit


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
