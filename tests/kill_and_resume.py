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

TIMINGS = ("time", "tok_s", "wall_tok_s", "memory_bytes")


def command(overrides: list[str]) -> list[str]:
    return [sys.executable, "-m", "pipelines", "promote=false", *overrides]


def finish(directory: Path, overrides: list[str]) -> None:
    """Run to the end; a refusal by the gate (3) is an end too."""
    done = subprocess.run(command(overrides), cwd=directory, env=environment(), capture_output=True)
    if done.returncode not in (0, 3):
        raise SystemExit(f"exit code {done.returncode}: {done.stderr.decode()[-2000:]}")


def kill_at(
    directory: Path, overrides: list[str], step: int, delay_s: float, *, in_a_save: bool
) -> bool:
    """Start, and SIGKILL at an instant after training has passed `step`.

    delay_s: how long after it. in_a_save: at the first half-written checkpoint after it instead.
    Returns whether the run was still going on.
    """
    process = subprocess.Popen(
        command([*overrides, "resume=auto"]),
        cwd=directory,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def half_written() -> set[Path]:
        return set(directory.glob("outputs/*/*/*/checkpoints/.writing-*"))

    while process.poll() is None and last_step(directory) < step:
        time.sleep(0.005)
    before = half_written()  # of earlier kills
    while in_a_save and process.poll() is None and not half_written() - before:
        time.sleep(0.001)
    if not in_a_save:
        time.sleep(delay_s)
    if process.poll() is not None:
        return False
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return True


def last_step(directory: Path) -> int:
    """The last training step in the metrics of the one run below a directory; -1 before any."""
    found = list(directory.glob("outputs/*/*/*/metrics.jsonl"))
    if not found:
        return -1
    lines = found[0].read_text().rpartition("\n")[0].splitlines()
    return json.loads(lines[-1])["step"] if lines else -1


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
        total = training_values(run_directory(plain))[-1]["step"]
        # -1: while it starts, before there is anything to go on from.
        steps = [-1, *sorted(choose.sample(range(total), options.kills - 1))]
        in_saves = set(choose.sample(range(1, options.kills - 1), options.saves))
        kills = saves = 0
        for number, step in enumerate(steps):
            saving = number in in_saves
            delay = choose.uniform(0, 0.5) if number else choose.uniform(0.5, 3)
            caught = kill_at(killed, options.overrides, step, delay, in_a_save=saving)
            kills += caught
            saves += caught and saving
            where = " inside a save" if saving else ""
            print(f"kill {number + 1} after step {step}{where}: {caught}", flush=True)
            if not caught:
                break
        if kills == len(steps):
            finish(killed, [*options.overrides, "resume=auto"])
        differences = compare(run_directory(plain), run_directory(killed))
    print(f"{kills} kills, {saves} of them inside a save: ", end="")
    print("the same values, bit for bit" if not differences else "\n".join(differences))
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
