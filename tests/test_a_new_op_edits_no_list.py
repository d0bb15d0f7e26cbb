"""The op of docs/adding.md, put into a copy of the tree, is declared, fused, tested and timed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import xtrain

ROOT = Path(xtrain.__file__).resolve().parents[1]
OP, KERNEL = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adding.md").read_text(), re.S)[:2]


def tree(tmp_path):
    """A copy of what tests and benchmarks need, with one op and its kernels added."""
    for name in ("xtrain", "benchmarks", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests/test_ops.py", tmp_path / "tests")
    shutil.copytree(ROOT / "tests/cuda", tmp_path / "tests/cuda")
    (tmp_path / "xtrain/engine/ops/doubled.py").write_text(OP)
    (tmp_path / "xtrain/cpu/doubled.py").write_text(KERNEL.format(backend="cpu"))
    (tmp_path / "xtrain/cuda/kernels/doubled.py").write_text(KERNEL.format(backend="cuda"))
    return tmp_path


def run(place, *arguments, **environment):
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=place,
        env={"PATH": "/usr/bin:/bin", "HOME": str(place), "PYTHONPATH": str(place), **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_new_op_is_found_tested_simulated_and_timed(tmp_path):
    place = tree(tmp_path)
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "doubled")
    checks = run(place, *pytest, "tests/test_ops.py")
    assert int(re.search(r"(\d+) passed", checks)[1]) >= 8
    simulated = run(place, *pytest, "tests/cuda/test_simulator_ops.py", NUMBA_ENABLE_CUDASIM="1")
    assert "1 passed" in simulated
    ops = ["ops", "--op", "doubled", "--model", "v0", "--batch", "1", "--seq", "8", "--json"]
    timed = run(place, "-m", "benchmarks", *ops)
    assert "ops/doubled/stream/forward" in timed and "ops/doubled/stream/backward" in timed
