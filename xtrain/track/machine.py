"""This machine and its processes, as a manifest names them."""

import importlib
import os
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("xtrain", "numpy", "numba", "numba-cuda", "cupy-cuda12x", "cupy-cuda13x", "mlflow")


def identity() -> dict[str, object]:
    """This process: pid, process (its start mark) and host."""
    return {
        "pid": os.getpid(),
        "process": process_mark(os.getpid()),
        "host": socket.gethostname(),
    }


def may_be_alive(named: dict[str, object]) -> bool:
    """Whether the process of an `identity` may still exist; on another machine nobody can tell."""
    if named.get("host") != socket.gethostname():
        return True
    mark = process_mark(int(named.get("pid") or -1))
    return mark is not None and mark == named.get("process")


def process_mark(pid: int) -> str | None:
    """A text that two processes never share although they share a pid; None when there is none.

    On Linux it is the boot id and the start time in clock ticks; elsewhere only existence can be
    asked.
    """
    if not Path("/proc/self/stat").exists():
        return "exists" if _exists(pid) else None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else f"{boot}:{started}"


def device_facts(device: str) -> dict[str, object]:
    """`system_facts`, and on `cuda` under `gpu` those of the GPU, its driver and its packages."""
    found = system_facts()
    if device == "cuda":
        found["gpu"] = importlib.import_module("xtrain.cuda.runtime").facts()
    return found


def system_facts() -> dict[str, object]:
    """Facts for a manifest: versions, processor, usable cores, memory in bytes, command line."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "command": " ".join(sys.argv),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
