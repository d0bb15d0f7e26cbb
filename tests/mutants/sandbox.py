"""A copy of the project in which a fault is planted, asked about, and taken out again."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .mutant import Mutant
from .results import CAUGHT, NO_CONTROL, SURVIVED, TIMED_OUT

COPIED = ("xtrain", "gates", "pipelines", "benchmarks", "conf", "tests", "pyproject.toml")
# Numba keeps what it compiled by function and file, and does not see a callee in another file.
COMPILED = ("xtrain/cpu/", "xtrain/engine/scalar.py")
ASK_A_GATE = """
import sys
from gates.judging.find import find_gates
from gates.judging.judge import ERROR, FAIL, judge
from xtrain.config.bars import gate_checks
name, measure = sys.argv[1:]
gate = find_gates()[name].load()
(ask,) = [m for m in gate.measures if m.__name__ == measure]
measured = ask("cpu")
checks = [c for c in gate_checks(name)[0] if c.name in measured and c.applies_to("cpu")]
missed = [r for r in judge(checks, measured, "cpu") if r.verdict in (FAIL, ERROR)]
print([f"{r.check.name} {r.value}" for r in missed])
sys.exit(1 if missed else 0)
"""


class Sandbox:
    """The copy at `place`, with the times of the files, so that compiled kernels still hold."""

    def __init__(self, root: Path, place: Path, timeout_s: float):
        self.place, self.timeout_s = place, timeout_s
        self._sound: dict[tuple[str, ...], bool] = {}
        place.mkdir(parents=True)
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, place / name, copy_function=shutil.copy2)
            else:
                shutil.copy2(root / name, place / name)

    def verdict(self, mutant: Mutant, kind: str) -> str:
        """Whether the mutant's `test` or `gate` passes without the fault and fails with it."""
        command = tuple(_command(mutant, kind))
        if command not in self._sound:
            self._sound[command] = self._code(command) == 0
        if not self._sound[command]:
            return NO_CONTROL
        file = self.place / mutant.file
        sound, times = file.read_text(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
        own_cache = mutant.file.startswith(COMPILED)
        try:
            file.write_text(mutant.apply(sound))
            code = self._code(command, own_cache=own_cache)
        finally:
            file.write_text(sound)
            os.utime(file, ns=times)
        if code is None:
            return TIMED_OUT
        return SURVIVED if code == 0 else CAUGHT

    def _code(self, command: Sequence[str], *, own_cache: bool = False) -> int | None:
        """The exit code of a Python command in the copy, None when it took too long.

        A test that fails is 1 of pytest; a collection error is a fault that was noticed as well.
        """
        environment = {**os.environ, "PYTHONPATH": str(self.place), "PYTHONDONTWRITEBYTECODE": "1"}
        if own_cache:
            environment["NUMBA_CACHE_DIR"] = str(self.place.with_name("numba"))
            shutil.rmtree(environment["NUMBA_CACHE_DIR"], ignore_errors=True)
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=self.place,
                env=environment,
                capture_output=True,
                timeout=self.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        return done.returncode


def _command(mutant: Mutant, kind: str) -> list[str]:
    if kind == "gate":
        return ["-c", ASK_A_GATE, *mutant.gate.split(":")]
    node, _, expression = mutant.test.partition(" -k ")
    chosen = ["-k", expression] if expression else []
    return ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", node, *chosen]
