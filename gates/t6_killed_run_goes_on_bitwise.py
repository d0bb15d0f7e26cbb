"""T6: AdamW is PyTorch's, and a run that is killed goes on as if it had not been.

Claim   100 steps of AdamW and ten training steps are torch's to rounding; every step of the loop is
        given its own learning rate, windows and dropout keys, by number; a run killed in its
        warm-up and again beyond an epoch's end logs, after resuming, the very same bits (loss,
        gradient norm, learning rate, tokens, epoch, evaluation) and ends with the same checkpoint.
Why     An update or a window that is lost or doubled at a resume never shows in one loss curve.
Reads   gates/golden/*.npz, made once with torch and transformers; step_inputs.json.
Needs   A CPU or one CUDA device. About 10 seconds.
"""

import contextlib
import itertools
import json
import tempfile
import zlib
from pathlib import Path
from unittest import mock

from gates.instruments import tiny_run
from gates.instruments.child import last_line, run_python
from gates.instruments.golden.compare import adamw_100_steps, golden_values
from gates.instruments.golden.reference import FOLDER
from gates.judging.gate import Defect, Gate
from xtrain.data.packing import PackedWindows
from xtrain.engine import device as devices
from xtrain.engine import ops, rng, scalar
from xtrain.engine.params import FlatBuffers
from xtrain.train import checkpoint, loop

# Between checkpoints (every 4 steps), so that lost steps are made again: in the warm-up of 6 steps,
# and after the first epoch's end at step 10.
KILLED_AT = (5, 14)
PROGRAM = ("-m", "gates.instruments.tiny_run")
# [number, learning rate, crc32 of the ids, dropout keys] of the 24 steps; a change of any is one of
# every trained model, so the file is only made anew with the recipe.
STEP_INPUTS = FOLDER / "step_inputs.json"


def ten_steps(device: str) -> dict[str, float]:
    return {"golden_ten_steps_rel": golden_values(device)["golden_ten_steps_rel"]}


def resume_after_kills(device: str) -> dict[str, float]:
    """Processes that are ended by SIGKILL and started again, against one that was left alone."""
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")
        _train(whole, device)
        for step in KILLED_AT:
            _train(killed, device, kill_at=step)
        _train(killed, device)
        return {"resume_differing_values": _differing(whole, killed)}


def step_inputs(device: str) -> dict[str, float]:
    """What the loop gives each step, from the start and after a resume, against stored values.

    By the step's number: the learning rate, a checksum of the windows, the dropout keys. A step
    that is left out or done once more than the resume explains counts as well.
    """
    here = devices.use(device)
    stored = json.loads(STEP_INPUTS.read_text())
    given: list[list] = []

    def note(number: int, tiny: tiny_run.Tiny) -> None:
        lr = float(here.host(tiny.optimizer.lr))
        ids = here.host(tiny.step.batch["input_ids"])
        keys = here.host(tiny.step.keys).tolist()
        given.append([number, lr, zlib.crc32(ids.tobytes()), keys])

    with tempfile.TemporaryDirectory() as folder:
        tiny_run.run(Path(folder), here, until=KILLED_AT[1], seen=note)
        tiny_run.run(Path(folder), here, seen=note)
    resumed = KILLED_AT[1] // tiny_run.TRAIN.save_every_steps * tiny_run.TRAIN.save_every_steps
    wanted = stored[: KILLED_AT[1]] + stored[resumed:]
    differing = sum(g != w for g, w in zip(given, wanted, strict=False))
    return {"step_inputs_differing": float(differing + abs(len(given) - len(wanted)))}


def resume_in_process(device: str) -> dict[str, float]:
    """The same without kills: the loop is left and everything is built anew from the checkpoint."""
    here = devices.use(device)
    with tempfile.TemporaryDirectory() as folder:
        whole, left = Path(folder, "whole"), Path(folder, "left")
        tiny_run.run(whole, here)
        tiny_run.run(left, here, until=KILLED_AT[1])
        tiny_run.run(left, here)
        return {"resume_differing_values": _differing(whole, left)}


def same_seed(device: str) -> dict[str, float]:
    """Files of the last checkpoints of two trainings whose sha256 differ."""
    here = devices.use(device)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("one", "two"):
            tiny_run.run(Path(folder, name), here)
        one, two = (_hashes(Path(folder, name)) for name in ("one", "two"))
    return {"same_seed_checkpoint_mismatches": float(tiny_run.differing(one, two))}


def _train(directory: Path, device: str, kill_at: int | None = None) -> None:
    options = [] if kill_at is None else ["--kill-at", str(kill_at)]
    result = run_python(*PROGRAM, directory, "--device", device, *options)
    if result.returncode != (0 if kill_at is None else -9):
        raise RuntimeError(f"training ended with {result.returncode}: {last_line(result.stderr)}")


def _differing(whole: Path, resumed: Path) -> float:
    traces = [tiny_run.read_trace(d) | _hashes(d) for d in (whole, resumed)]
    return float(tiny_run.differing(*traces))


def _hashes(directory: Path) -> dict[str, str]:
    found, damaged = checkpoint.latest(directory / "checkpoints")
    assert found is not None and found.step == tiny_run.TRAIN.total_steps, damaged
    return dict(found.manifest["sha256"])


def _processes_lose_the_moments():
    """The program of the processes forgets both moments at a resume."""
    program = (
        "from gates.instruments import tiny_run\n"
        "restore = tiny_run.checkpoint.restore\n"
        "def forget(found, buffers, optimizer, device):\n"
        "    restore(found, buffers, optimizer, device)\n"
        "    buffers.moment1[...] = 0\n"
        "    buffers.moment2[...] = 0\n"
        "tiny_run.checkpoint.restore = forget\n"
        "tiny_run.main()"
    )
    return mock.patch.dict(globals(), PROGRAM=("-c", program))


def _the_rate_is_that_of_the_next_step():
    sound = loop.learning_rate
    return mock.patch.object(loop, "learning_rate", lambda c, step, n: sound(c, step + 1, n))


def _the_windows_are_those_of_the_next_step():
    sound = PackedWindows.batch
    return mock.patch.object(PackedWindows, "batch", lambda self, step: sound(self, step + 1))


def _the_keys_are_those_of_the_next_step():
    sound = rng.key_array
    return mock.patch.object(rng, "key_array", lambda xp, s, step, a=0: sound(xp, s, step + 1, a))


@contextlib.contextmanager
def _after_restore(owner, name: str, spoil):
    """From the first restore on, `owner.name` is spoil(itself, step of the checkpoint)."""
    restore, sound = checkpoint.restore, getattr(owner, name)

    def restore_and_spoil(found, *arguments):
        restore(found, *arguments)
        setattr(owner, name, spoil(sound, found.step))

    with (
        mock.patch.object(owner, name, sound),  # puts it back at the end
        mock.patch.object(checkpoint, "restore", restore_and_spoil),
    ):
        yield


def _learning_rate_is_off_by_one():
    return _after_restore(
        loop, "learning_rate", lambda f, _: lambda config, step, total: f(config, step + 1, total)
    )


def _dropout_key_starts_anew():
    return _after_restore(
        rng, "key_array", lambda f, start: lambda xp, seed, step, a=0: f(xp, seed, step - start, a)
    )


def _data_start_anew():
    return _after_restore(
        PackedWindows, "batch", lambda f, start: lambda self, step: f(self, step - start)
    )


@contextlib.contextmanager
def _moments_are_not_restored():
    restore = checkpoint.restore

    def weights_only(found, buffers, optimizer, device):
        restore(found, buffers, optimizer, device)
        buffers.moment1[...] = 0
        buffers.moment2[...] = 0

    with mock.patch.object(checkpoint, "restore", weights_only):
        yield


@contextlib.contextmanager
def _epsilon_is_inside_the_root():
    def weight(p, m, root_v, shrink, step_size, sqrt_bias2, eps):
        return p * shrink - step_size * (m / ((root_v / sqrt_bias2) ** 2 + eps) ** 0.5)

    reference = ops.adamw.reference
    with (
        mock.patch.object(scalar, "adamw_weight", weight),
        mock.patch.object(ops.adamw, "implementation", lambda arrays: reference),
    ):
        yield


@contextlib.contextmanager
def _gains_are_decayed_too():
    made = FlatBuffers.__init__

    def make(self, *arguments, **options):
        made(self, *arguments, **options)
        self.decayed = self.size

    with mock.patch.object(FlatBuffers, "__init__", make):
        yield


def _each_key_is_new():
    """Random numbers go on from where the training before left them, as a global state would."""
    key_array, count = rng.key_array, itertools.count()
    return mock.patch.object(
        rng, "key_array", lambda xp, seed, step, a=0: key_array(xp, seed + next(count), step, a)
    )


RESUME, INPUTS = "resume_differing_values", "step_inputs_differing"
GATE = Gate(
    "T6",
    "Training",
    measures=(adamw_100_steps, ten_steps, step_inputs, resume_after_kills, same_seed),
    defects=(
        Defect("eps", "adamw_100_steps_rel", adamw_100_steps, _epsilon_is_inside_the_root),
        Defect("decay", "golden_ten_steps_rel", ten_steps, _gains_are_decayed_too),
        Defect("next rate", INPUTS, step_inputs, _the_rate_is_that_of_the_next_step),
        Defect("next windows", INPUTS, step_inputs, _the_windows_are_those_of_the_next_step),
        Defect("next keys", INPUTS, step_inputs, _the_keys_are_those_of_the_next_step),
        Defect("lost moments", RESUME, resume_after_kills, _processes_lose_the_moments),
        Defect("learning rate", RESUME, resume_in_process, _learning_rate_is_off_by_one),
        Defect("dropout key", RESUME, resume_in_process, _dropout_key_starts_anew),
        Defect("data order", RESUME, resume_in_process, _data_start_anew),
        Defect("moments", RESUME, resume_in_process, _moments_are_not_restored),
        Defect("seed", "same_seed_checkpoint_mismatches", same_seed, _each_key_is_new),
    ),
)
