"""T7: the step stays on the device, and is three times as fast for it.

Claim   The device's AdamW is the host reference bit for bit over several updates, clipped, skipped
        and with a bf16 copy; a captured step hands at most 64 bytes to the host; cuBLAS instead of
        our tiled product, the optimizer on the GPU and no wait after every op each pay, and all
        three together at least threefold at v0's size.
Why     An optimizer that rounds differently on another device ends in another model, and one read
        a step makes the host wait for the GPU and the GPU for the host.
Reads   conf/run/v0 and conf/phase/t7, for the size and for what is on as of this phase.
Needs   A CPU for the bits; all else one CUDA device that nobody else uses. About 15 seconds.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from gates.instruments import paired, tiny_run
from gates.instruments.bits import differing_bits
from gates.instruments.real_step import loaded_step
from gates.judging.gate import Defect, Gate, NotMeasured
from xtrain.assemble.learner import build
from xtrain.config.schema import Features
from xtrain.engine import device as devices
from xtrain.engine import ops
from xtrain.engine.dtype import bfloat16, float32, float64
from xtrain.engine.params import FlatBuffers, Parameter
from xtrain.engine.testing import worst
from xtrain.train import loop
from xtrain.train.config import OptimConfig
from xtrain.train.optimizer import AdamW

OPTIM = OptimConfig(lr=1e-2, clip_norm=1.0)
# Scales of the gradients of seven updates: clipped, not clipped, not finite, tiny, huge.
SCALES = (1.0, 1e-4, np.nan, 1e-9, 1e4, np.inf, 1e-3)
SIZES = {"matrix": 70_001, "gain": 333}  # no multiple of any vector width
WARM_UP = 4  # steps before a captured one is steady
OFF = {"tiled": {"gemm": "tiled"}, "host": {"optimizer": "host"}, "sync": {"op_sync": True}}


def optimizer_bits(device: str) -> dict[str, float]:
    """The device's updates against the host reference, which is given the device's gradient norm.

    A difference in bits that is none in value counts as the smallest normal number.
    """
    with np.errstate(invalid="ignore"):  # a skipped gradient is multiplied before it is left out
        off = worst(_worst_difference(device, precision) for precision in ("fp32", "bf16"))
    return {"adamw_device_vs_host": off}


def _worst_difference(device: str, precision: str) -> float:
    here, ours = _optimizer(device, precision)
    host, theirs = _optimizer("cpu", precision)
    differences = []
    for step, scale in enumerate(SCALES):
        gradient = np.random.default_rng(step).standard_normal(ours.buffers.size)
        gradient = (scale * gradient).astype(float32)
        devices.use(device)
        norm = float(here.host(_updated(ours, here, gradient, step)))
        devices.use("cpu")
        with _reference_on_the_host(norm):
            _updated(theirs, host, gradient, step)
        pairs = zip(_state(ours, here), _state(theirs, host), strict=True)
        differences += [_difference(*pair) for pair in pairs]
    return worst(differences)


def _optimizer(device: str, precision: str):
    here = devices.use(device)
    named = [(n, Parameter((s,), std=None, decay=n == "matrix")) for n, s in SIZES.items()]
    buffers = FlatBuffers(named, here, precision)
    start = np.random.default_rng(9).standard_normal(buffers.size).astype(float32)
    buffers.master[...] = here.array(start)
    buffers.refresh_copy()
    return here, AdamW(buffers, OPTIM, here)


def _updated(optimizer: AdamW, here, gradient: np.ndarray, step: int):
    optimizer.buffers.grad[...] = here.array(gradient)
    optimizer.lr[...] = np.float32(OPTIM.lr / (step + 1))
    return optimizer.update()


@contextlib.contextmanager
def _reference_on_the_host(norm: float):
    """The readable reference of both ops, whatever kernels the CPU has and whatever is spoilt."""
    adamw = ops.adamw.reference
    with (
        mock.patch.object(ops.adamw, "implementation", lambda arrays: adamw),
        mock.patch.object(ops.global_norm, "run", lambda gradient: np.asarray(norm)),
    ):
        yield


def _state(optimizer: AdamW, here) -> list[np.ndarray]:
    b = optimizer.buffers
    kept = [b.master, b.grad, b.moment1, b.moment2, optimizer.updates, optimizer.skipped]
    return [here.host(array).copy() for array in (*kept, *([] if b.copy is None else [b.copy]))]


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    if not differing_bits(one, other):
        return 0.0
    distance = np.abs(one.astype(float64) - other.astype(float64)).max()
    return max(float(distance), float(np.finfo(float32).tiny))


def traffic(device: str) -> dict[str, float]:
    """Bytes that the host is given in a steady step of the loop, which logs every step here.

    What the captured graph copies by itself, and what the host then reads.
    """
    if device != "cuda":
        return {}
    here = devices.use(device)
    tiny = tiny_run.build(here)
    read: list[int] = []
    hooks = loop.Hooks(
        log=lambda step, values: read.append(here.bytes_to_host),
        evaluate=lambda step: None,
        save=lambda step: None,
        stop=lambda: None,
    )
    with tempfile.TemporaryDirectory() as folder:
        source, _ = tiny_run.sources(Path(folder))
        loop.train(
            tiny.step,
            source,
            start=0,
            train_config=replace(tiny_run.TRAIN, dropout=0.0),
            optim_config=tiny_run.OPTIM,
            hooks=hooks,
        )
    by_step = np.diff(read)[WARM_UP:]
    of_itself = getattr(tiny.step.run, "bytes_to_host", 0)  # a step that is not captured has none
    return {"device_to_host_bytes_per_step": float(by_step.max() + of_itself)}


def speed(device: str) -> Mapping[str, float | NotMeasured]:
    """Time of v0's step as of this phase, and with each of its three steps taken back."""
    if device != "cuda":
        return {}
    run = paired.as_of("t7", "v0", device)
    learner = build(run)
    step = loaded_step(run, learner)
    ways = {name: paired.Way(step.run, each) for name, each in _switched(run.features).items()}
    names = {
        "library_gemm_speedup": "tiled",
        "device_optimizer_speedup": "host",
        "no_op_sync_speedup": "sync",
        "all_on_speedup": "all off",
    }
    declined = paired.busy(learner.device)
    if declined:
        return dict.fromkeys(names, declined)
    wanted = {name: (off, "all on") for name, off in names.items()}
    return paired.ratios(learner.device, ways, wanted, rounds=9, steps=2)


def _switched(features: Features) -> dict[str, Features]:
    """As of this phase, with one of its steps off, and with all of them off."""
    off = {name: replace(features, **values) for name, values in OFF.items()}
    together = {key: value for values in OFF.values() for key, value in values.items()}
    return {"all on": features, **off, "all off": replace(features, **together)}


def _kernels_spoilt(spoil):
    """Every kernel of AdamW replaced by spoil(kernel's forward)."""
    spoilt = {
        key: dataclasses.replace(chosen, forward=spoil(chosen.forward))
        for key, chosen in ops.adamw.fused.items()
    }
    return mock.patch.dict(ops.adamw.fused, spoilt)


def _rounds_once_instead_of_at_every_operation():
    """The update in float64, rounded at its end: more exact, and not the same."""

    def spoil(sound):
        def forward(xp, p, g, m, v, hyper, copy, **attrs):
            wide = [array.astype(float64) for array in (p, g, m, v)]
            ops.adamw.reference.forward(xp, *wide, hyper, None, **attrs)
            for array, exact in zip((p, g, m, v), wide, strict=True):
                array[...] = exact.astype(float32)
            if copy is not None:
                copy[...] = p[: copy.size].astype(bfloat16)
            return p, None

        return forward

    return _kernels_spoilt(spoil)


def _a_skipped_gradient_decays_the_weights_all_the_same():
    def spoil(sound):
        def forward(xp, p, g, m, v, hyper, copy, *, decayed, weight_decay, **attrs):
            shrink = np.float32(1) - hyper[0] * np.float32(weight_decay)
            p[:decayed] *= xp.where(hyper[4] == 0, shrink, np.float32(1))
            return sound(
                xp, p, g, m, v, hyper, copy, decayed=decayed, weight_decay=weight_decay, **attrs
            )

        return forward

    return _kernels_spoilt(spoil)


@contextlib.contextmanager
def _the_optimizer_runs_on_the_host():
    use = devices.use

    def use_with_host_optimizer(name):
        here = use(name)
        here.configure(op_sync=False, pool=True, capture=False)
        here.variants |= {"adamw": "host", "global_norm": "host"}
        return here

    with mock.patch.object(devices, "use", use_with_host_optimizer):
        yield


def _switches_switch_nothing():
    return mock.patch.object(paired, "configure", lambda device, features: None)


BITS, ALL_ON = "adamw_device_vs_host", "all_on_speedup"
GATE = Gate(
    "T7",
    "Library GEMM, device optimizer, no sync per op",
    measures=(optimizer_bits, traffic, speed),
    defects=(
        Defect("rounds once", BITS, optimizer_bits, _rounds_once_instead_of_at_every_operation),
        Defect(
            "skipped decay",
            BITS,
            optimizer_bits,
            _a_skipped_gradient_decays_the_weights_all_the_same,
        ),
        Defect(
            "host optimizer",
            "device_to_host_bytes_per_step",
            traffic,
            _the_optimizer_runs_on_the_host,
        ),
        Defect("no switch", ALL_ON, speed, _switches_switch_nothing),
    ),
    composes=("run/v0", "model/v0", "phase/t7"),
)
