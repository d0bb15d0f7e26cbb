"""Kill a run with SIGKILL at random instants, resume it each time, compare with an undisturbed one.

    python tests/kill_and_resume.py [--kills 20] [--seed 0] [key=value ...]

Every training value (loss, learning rate, gradient norm, tokens, epoch, held-out loss) of every
step must be the same bit for bit, no step may be missing or doubled, and the last checkpoint must
have the same sha256. Exit code 0 if so, 1 with the first differences if not.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TIMINGS = ("time", "tok_s", "memory_bytes")


def command(overrides: list[str]) -> list[str]:
    return [sys.executable, "-m", "pipelines", "promote=false", *overrides]


def finish(directory: Path, overrides: list[str]) -> None:
    """Run to the end; a refusal by the gate (3) is an end too."""
    done = subprocess.run(command(overrides), cwd=directory, env=environment(), capture_output=True)
    if done.returncode not in (0, 3):
        raise SystemExit(f"exit code {done.returncode}: {done.stderr.decode()[-2000:]}")


def kill_after(directory: Path, overrides: list[str], delay_s: float) -> bool:
    """Start, SIGKILL after a delay; returns whether it was still running."""
    process = subprocess.Popen(
        command([*overrides, "resume=auto"]),
        cwd=directory,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        process.wait(delay_s)
        return False
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        return True


def kill_in_a_save(directory: Path, overrides: list[str], deadline_s: float) -> bool:
    """Start, SIGKILL as soon as a checkpoint is half written; returns whether one was caught."""
    before = {p.name for p in directory.glob("outputs/*/*/*/checkpoints/.writing-*")}
    process = subprocess.Popen(
        command([*overrides, "resume=auto"]),
        cwd=directory,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + deadline_s
    while process.poll() is None and time.monotonic() < end:
        found = {p.name for p in directory.glob("outputs/*/*/*/checkpoints/.writing-*")}
        if found - before:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.002)
    process.kill()
    process.wait()
    return False


def environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


def run_directory(directory: Path) -> Path:
    """The one run below a directory: more would mean that a resume started another."""
    found = [p.parent for p in directory.glob("outputs/*/*/*/manifest.json")]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} run directories below {directory}, expected one")
    return found[0]


def training_values(run: Path) -> list[dict]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in TIMINGS} for r in records]


def last_checkpoint(run: Path) -> dict:
    steps = sorted((run / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name))
    return json.loads((steps[-1] / "manifest.json").read_text())


def compare(plain: Path, killed: Path) -> list[str]:
    """Lines that say what differs; none when the two runs are the same."""
    ours, theirs = training_values(killed), training_values(plain)
    lines = [f"{a} instead of {b}" for a, b in zip(ours, theirs, strict=False) if a != b][:5]
    if len(ours) != len(theirs):
        lines.append(f"{len(ours)} records instead of {len(theirs)}")
    if last_checkpoint(killed) != last_checkpoint(plain):
        lines.append("the last checkpoints differ")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--saves", type=int, default=4, help="how many of them inside a save")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", default=["run=v0"])
    options = parser.parse_args()
    choose = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        plain, killed = Path(scratch) / "plain", Path(scratch) / "killed"
        plain.mkdir()
        killed.mkdir()
        started = time.monotonic()
        finish(plain, options.overrides)
        length = time.monotonic() - started
        print(f"undisturbed: {length:.1f} s", flush=True)
        in_saves = set(choose.sample(range(options.kills), options.saves))
        kills = saves = 0
        for number in range(options.kills):
            if number in in_saves:
                caught = kill_in_a_save(killed, options.overrides, 2 * length)
                saves += caught
            else:
                caught = kill_after(killed, options.overrides, choose.uniform(0.5, length / 3))
            kills += caught
            print(f"kill {number + 1}: {'killed' if caught else 'it had ended'}", flush=True)
            if not caught:
                break
        finish(killed, [*options.overrides, "resume=auto"])
        differences = compare(run_directory(plain), run_directory(killed))
    print(f"{kills} kills, {saves} of them inside a save: ", end="")
    print("the same values, bit for bit" if not differences else "\n".join(differences))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
