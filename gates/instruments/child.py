"""Run this Python in a child: simulators, kills and missing drivers need a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import xtrain

ROOT = Path(xtrain.__file__).resolve().parents[1]  # where the packages are importable from


def run_python(
    *arguments: str, cwd: Path | None = None, timeout_s: int = 120, **environment: str
) -> subprocess.CompletedProcess:
    """Run `python ARGUMENTS`, with changes to the environment; the CompletedProcess, with text."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def last_line(text: str) -> str:
    """The last line that says something, or `no output`."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
