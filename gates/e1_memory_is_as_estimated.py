"""E1: the memory that dry_run estimates is what a training step takes.

Claim   A whole run through the command, trained, evaluated, exported and measured again, holds what
        was estimated within a tenth. Every run of conf/run composes and has an estimate; the
        state's is that of its arrays; on a GPU that of training is within a tenth of the peak of
        three training steps, the third captured, for v1 to v12.
Why     A run that will not fit should be refused in a second, not after an hour in a queue.
Reads   conf/run/v0 to v12. A run that takes the same step as one before it, model, batch and
        features, is not measured twice: v6 and v7 are v5's, v10 is v9's.
Needs   A CPU; for the peaks one CUDA device, with room for v4: 45 GB. A run that is estimated to
        need more than is free is left out, by name.
"""

import sys
from dataclasses import replace
from unittest import mock

from gates.instruments import whole_run
from gates.instruments.real_step import on, three_steps
from gates.judging.gate import Defect, Explained, Gate, NotMeasured
from xtrain.assemble import estimate
from xtrain.assemble.learner import Learner, build
from xtrain.config.bars import official
from xtrain.config.files import choices_of, package_conf_dir
from xtrain.config.schema import RunConfig
from xtrain.engine import device as devices
from xtrain.errors import UsageError
from xtrain.train.step import TrainingStep

MEASURED = tuple(f"v{number}" for number in range(1, 13))


def runs(device: str) -> dict[str, float]:
    """How many runs v* of conf/run compose and have an estimate for a GPU."""
    names = [n for n in choices_of(package_conf_dir(), "run") if n.startswith("v")]
    refused = []
    for name in names:
        try:
            estimate.training_memory_bytes(official(name), "cuda")
        except UsageError as error:
            refused.append(f"{name}: {error}")
    return {"runs_estimated": Explained(len(names) - len(refused), "; ".join(refused))}


def state(device: str) -> dict[str, float]:
    """Distance of v0's estimated weights, gradients and moments from the arrays that hold them."""
    run = on(device, official("v0"))
    buffers = build(run, initialize=False).buffers
    arrays = (buffers.master, buffers.grad, buffers.moment1, buffers.moment2, buffers.copy)
    held = sum(array.nbytes for array in arrays if array is not None)
    said = estimate.training_memory_bytes(run, device).state
    return {"state_bytes_rel": abs(said - held) / held}


def peaks(device: str) -> dict[str, float | NotMeasured]:
    """The worst relative distance of the estimate from the measured peak, over the runs."""
    if device != "cuda":
        return {"worst_estimate_rel": NotMeasured("needs a GPU")}
    here = devices.use(device)
    worst, said_of_worst, left_out = 0.0, "", []
    for run in different_steps([on(device, official(name)) for name in MEASURED]):
        said = estimate.training_memory_bytes(run, device).total
        here.restart_peak()
        free = here.free_bytes()
        if said > free:
            left_out.append(run.name)
            print(f"{run.name}: {said / 1e9:.2f} GB do not fit {free / 1e9:.2f}", file=sys.stderr)
            continue
        held = here.peak_of(lambda run=run: _stepped(run))
        off = said / held - 1
        shown = f"{run.name}: estimated {said / 1e9:.2f} GB, held {held / 1e9:.2f} GB ({off:+.1%})"
        print(shown, file=sys.stderr)
        if abs(off) >= worst:
            worst, said_of_worst = abs(off), shown
    if not said_of_worst:
        return {"worst_estimate_rel": NotMeasured(f"no room for {', '.join(left_out)}")}
    missing = f"; left out for want of room: {', '.join(left_out)}" if left_out else ""
    return {"worst_estimate_rel": Explained(worst, said_of_worst + missing)}


def whole(device: str) -> dict[str, float]:
    """Distance of the estimate from the most that a whole run held, of any of its stages."""
    said, held = whole_run.whole_run(device)
    off = said.largest / held - 1
    shown = (
        f"estimated {said.largest / 1e9:.2f} GB for {said.fullest}, "
        f"held {held / 1e9:.2f} GB ({off:+.1%})"
    )
    print(f"whole run: {shown}", file=sys.stderr)
    return {"whole_run_rel": Explained(abs(off), shown)}


def different_steps(given: list[RunConfig]) -> list[RunConfig]:
    """The runs without those that take the same step as one before: model, batch and features."""
    found: dict[str, RunConfig] = {}
    for run in given:
        train = run.train
        sizes = (train.batch_size, train.seq_len, train.accumulation, train.dropout)
        found.setdefault(repr((run.model, sizes, run.features)), run)
    return list(found.values())


def _stepped(run: RunConfig) -> tuple[Learner, TrainingStep]:
    """The learner and step of a run after three steps, held together.

    The weights stay zero: no array's size depends on them.
    """
    learner = build(run, initialize=False)
    return learner, three_steps(run, learner)


def _a_run_does_not_compose():
    sound = official

    def wrong(name: str) -> RunConfig:
        if name == "v3":
            raise UsageError("model=v3a: there is no such model")
        return sound(name)

    return mock.patch(f"{__name__}.official", wrong)


def _the_trained_model_stays_beside_the_measured_one():
    return whole_run.spoilt(
        "from xtrain.train.learner import Learner\n"
        "Learner.keep_weights_ = Learner.release_ = lambda self: None"
    )


def _forgotten(*parts: str):
    """An estimate in which these parts of the memory are missing."""
    sound = estimate.training_memory_bytes

    def wrong(run: RunConfig, device_class: str) -> estimate.Memory:
        return replace(sound(run, device_class), **dict.fromkeys(parts, 0))

    return mock.patch.object(estimate, "training_memory_bytes", wrong)


GATE = Gate(
    "E1",
    "Memory is as estimated",
    measures=(runs, state, peaks, whole),
    defects=(
        Defect("no such model", "runs_estimated", runs, _a_run_does_not_compose),
        Defect("no moments", "state_bytes_rel", state, lambda: _forgotten("moments")),
        Defect(
            "two models",
            "whole_run_rel",
            whole,
            _the_trained_model_stays_beside_the_measured_one,
        ),
        Defect("no tape", "worst_estimate_rel", peaks, lambda: _forgotten("activations")),
    ),
    composes=(
        *(f"run/v{number}" for number in range(13)),
        *(f"model/{name}" for name in ("v0", "v1", "v2", "v3", "v4", "v8", "v9", "v12")),
    ),
)
