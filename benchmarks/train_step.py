"""The training step against the compiled PyTorch step: the same model, batch and precision.

Ours is the real `TrainingStep` over the flat buffers, its batch copied from the host in every step;
the peer's batch already lies on the device. Both take their turns in one process.
"""

import math
import statistics
import time
from dataclasses import dataclass

import numpy as np
import yaml

from benchmarks import floor
from benchmarks.result import Contender, Result, interleave, paired_ratio, versions
from xtrain.config.files import choices, conf_dir
from xtrain.engine import device as devices
from xtrain.engine import rng
from xtrain.engine.params import FlatBuffers
from xtrain.errors import UsageError
from xtrain.models.config import Qwen3Config
from xtrain.models.counts import flops_per_token
from xtrain.models.qwen3 import Qwen3
from xtrain.train.config import OptimConfig
from xtrain.train.objectives.next_token import next_token
from xtrain.train.optimizer import AdamW
from xtrain.train.step import TrainingStep

LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Work:
    """One training step: a model of conf/model and the batch it takes."""

    model: str
    batch: int  # sequences in a micro-batch
    seq: int  # tokens in a sequence
    precision: str = "fp32"  # fp32 | bf16
    accumulation: int = 1  # micro-batches in a step
    remat: str = "none"  # none | mlp | block

    @property
    def tokens(self) -> int:
        return self.batch * self.seq * self.accumulation


def load_config(name: str, seq: int) -> Qwen3Config:
    """The shape named in conf/model, with room for `seq` positions; UsageError when unknown."""
    path = conf_dir() / "model" / f"{name}.yaml"
    if not path.is_file():
        raise UsageError(f"--model {name}: choose one of {', '.join(choices('model'))}")
    values = yaml.safe_load(path.read_text())
    known = {k: v for k, v in values.items() if k in Qwen3Config.__dataclass_fields__}
    known["max_position_embeddings"] = max(known["max_position_embeddings"], seq)
    return Qwen3Config(**known)


def random_batch(config: Qwen3Config, work: Work) -> dict[str, np.ndarray]:
    """Random tokens (A, B, T) and the ones that follow them: no step is cheaper than another."""
    shape = (work.accumulation, work.batch, work.seq + 1)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)
    return {
        "input_ids": np.ascontiguousarray(ids[..., :-1]),
        "targets": np.ascontiguousarray(ids[..., 1:]),
    }


class OurStep:
    """Model, optimizer and step on the current device, ready to be called again and again."""

    def __init__(self, config: Qwen3Config, work: Work, device):
        self.config, self.device = config, device
        self.model = Qwen3(config, remat_mode=work.remat)
        self.buffers = FlatBuffers(self.model.named_parameters(), device, work.precision)
        _draw_weights(self.buffers, device)
        optimizer = AdamW(self.buffers, OptimConfig(lr=LEARNING_RATE), device)
        self.step = TrainingStep(
            self.model, optimizer, next_token, seed=0, device=device, dropout=0.0
        )
        self.batch = random_batch(config, work)
        self.number = 0

    @property
    def parameters(self) -> int:
        return sum(p.count for p in self.buffers.parameters.values())

    def __call__(self):
        """Queue one step; returns (loss, grad_norm) on the device."""
        self.step.load(self.batch, self.number, LEARNING_RATE)
        self.number += 1
        return self.step.run()

    def loss(self) -> float:
        return float(self.device.host(self()[0]))


def _draw_weights(buffers: FlatBuffers, device) -> None:
    """Random weights drawn on the device, where that takes no time; on the host v9's take 13 s."""
    xp = device.xp
    key = rng.key_array(xp, 0, 0)
    for name, p in buffers.parameters.items():
        weights = buffers.view(buffers.master, name)
        weights[...] = 1 if p.std is None else 0
        if p.std is not None:
            drawn = rng.standard_normal(xp, p.count, key, rng.site_of(name))
            weights[: p.rows] = p.std * drawn.reshape(p.rows, *p.declared[1:])
    buffers.refresh_copy()


def measure(
    name: str, work: Work, *, backend: str, rounds: int, steps: int, peer: str | None
) -> Result:
    """Time a step. peer: None, `eager` or `compile`. Unit: tokens a second."""
    device = devices.use(backend)
    config = load_config(work.model, work.seq)
    ours = OurStep(config, work, device)
    theirs = _peer(config, work, ours.batch, device.name, peer) if peer else None
    our_s, peer_s = interleave(
        Contender(ours, device.synchronize),
        None if theirs is None else Contender(theirs, _wait_for_torch(device.name)),
        rounds=rounds,
        steps=steps,
        warm_up=4,
    )
    step_s = statistics.median(our_s)
    of_device = _device_detail(device, ours, theirs)  # before the rates' own arrays
    rates = floor.measured_rates(device, work.precision)
    flop = work.tokens * flops_per_token(config, work.seq)
    floor_s = floor.step_floor_s(
        config,
        tokens=work.tokens,
        seq=work.seq,
        parameters=ours.parameters,
        precision=work.precision,
        rates=rates,
    )
    detail = {
        "step_ms": step_s * 1e3,
        "spread_ms": (max(our_s) - min(our_s)) * 1e3,
        "floor_ms": floor_s * 1e3,
        "tflop_s": flop / step_s / 1e12,
        "of_matrix_rate": flop / step_s / rates.flops,
    }
    if device.name == "cuda" and work.precision == "bf16":
        detail["mfu"] = flop / step_s / floor.MFU_FLOPS
    if peer_s:
        detail["peer_step_ms"] = statistics.median(peer_s) * 1e3
    detail |= of_device
    detail["loss"] = _require_finite(ours.loss())
    return Result(
        name=name,
        work=_described(work, peer),
        device=device_name(device),
        unit="tok/s",
        ours=work.tokens / step_s,
        floor=work.tokens / floor_s,
        peer=work.tokens / statistics.median(peer_s) if peer_s else None,
        ratio=paired_ratio(our_s, peer_s),
        rounds=rounds,
        versions=versions(),
        detail=detail,
    )


def _described(work: Work, peer: str | None) -> dict:
    shown = {"model": work.model, "batch": work.batch, "seq": work.seq, "precision": work.precision}
    if work.accumulation > 1:
        shown["accumulation"] = work.accumulation
    if work.remat != "none":
        shown["remat"] = work.remat
    return shown | ({"peer": f"torch {peer}"} if peer else {})


def _peer(config, work: Work, batch, device: str, how: str):
    """The PyTorch step; UsageError when torch is not installed or cannot do the work."""
    if work.accumulation > 1 or work.remat != "none":
        raise UsageError("--peer: the peer has no accumulation and no remat; leave them out")
    try:
        from benchmarks.torch_model import make_step
    except ModuleNotFoundError:
        raise UsageError("--peer: PyTorch is not installed (pip install 'xtrain[peers]')") from None
    return make_step(
        config,
        batch["input_ids"][0],
        batch["targets"][0],
        device=device,
        bf16=work.precision == "bf16",
        compiled=how == "compile",
        vocab_size=config.vocab_size,
        learning_rate=LEARNING_RATE,
    )


def _wait_for_torch(device: str):
    import torch

    return torch.cuda.synchronize if device == "cuda" else lambda: None


def _device_detail(device, ours: OurStep, theirs) -> dict:
    """On a GPU: host time and device allocations of a steady step, and both programs' memory."""
    if device.name != "cuda":
        return {}
    device.synchronize()
    before, times = device.memory().allocations, []
    for _ in range(10):
        started = time.perf_counter()
        ours()
        times.append(time.perf_counter() - started)
        device.synchronize()
    detail = {
        "host_ms": statistics.median(times) * 1e3,
        "allocations": device.memory().allocations - before,
        "memory_reserved_gb": device.memory().peak_bytes / 2**30,
    }
    if theirs is not None:
        import torch

        detail["peer_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
        detail["peer_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return detail


def device_name(device) -> str:
    """The device in words, as a figure is quoted with it."""
    if device.name == "cuda":
        return device.description
    from xtrain.track.machine import system_facts

    facts = system_facts()
    return f"{facts['processor']}, {facts['cores']} cores"


def _require_finite(loss: float) -> float:
    """A figure of a step that computes nothing sensible is worth nothing."""
    if not math.isfinite(loss):
        raise FloatingPointError(f"the timed step gave the loss {loss}")
    return loss
