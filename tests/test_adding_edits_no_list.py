"""What docs/adding.md adds to a copy of the tree is found, tested and timed: an op and a gate."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import xtrain

ROOT = Path(xtrain.__file__).resolve().parents[1]
PAGE = (ROOT / "docs/adding.md").read_text()
OP, KERNEL, GATE = re.findall(r"```python\n(.*?)```", PAGE, re.S)
(BARS,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)


def tree(tmp_path):
    """A copy of what tests and benchmarks need, with one op and its kernels added."""
    for name in ("xtrain", "benchmarks", "conf", "gates", "pipelines", "peers"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests").mkdir()
    for test in ("test_ops.py", "test_gates.py"):
        shutil.copy(ROOT / "tests" / test, tmp_path / "tests")
    shutil.copytree(ROOT / "tests/cuda", tmp_path / "tests/cuda")
    (tmp_path / "xtrain/engine/ops/doubled.py").write_text(OP)
    (tmp_path / "xtrain/cpu/doubled.py").write_text(KERNEL.format(backend="cpu"))
    (tmp_path / "xtrain/cuda/kernels/doubled.py").write_text(KERNEL.format(backend="cuda"))
    (tmp_path / "gates/t99_doubled_is_twice.py").write_text(GATE)
    (tmp_path / "conf/phase/t99.yaml").write_text(BARS)
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


def test_a_new_gate_is_found_judged_proved_and_tested(tmp_path):
    place = tree(tmp_path)
    assert "T99 PASS on cpu: Doubling" in run(place, "-m", "gates", "T99", "--device", "cpu")
    proved = run(place, "-m", "gates", "T99", "--prove", "--device", "cpu")
    assert "it adds a little" in proved
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "t99")
    checks = run(place, *pytest, "tests/test_gates.py")
    assert int(re.search(r"(\d+) passed", checks)[1]) >= 3
