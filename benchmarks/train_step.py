"""The training step against PyTorch's: the same model, batch and precision.

The peer is the strongest form of the compiled step, or the eager one; the result says which it was.
Ours is the real `TrainingStep` over the flat buffers, its batch copied from the host in every step;
the peer's batch already lies on the device. Both take their turns in one process.
"""

import math
import statistics
import time

from benchmarks import floor
from benchmarks.result import Result, versions
from xtrain.assemble.sized_step import LEARNING_RATE, SizedStep, Work, load_config
from xtrain.assemble.timing import Contender, interleave, paired_ratio
from xtrain.engine import device as devices
from xtrain.errors import UsageError
from xtrain.models.counts import flops_per_token


def time_step(
    name: str, work: Work, *, backend: str, rounds: int, steps: int, peer: str | None
) -> Result:
    """Time a step. peer: None, `eager` or `compile`. Unit: tokens a second."""
    device = devices.use(backend)
    config = load_config(work.model, work.seq)
    ours = SizedStep(config, work, device)
    theirs = _peer(config, work, ours.batch, device.name, peer) if peer else None
    described = _described(work, theirs)
    contenders = {"ours": Contender(ours, device.synchronize)}
    if theirs is not None:
        contenders["peer"] = Contender(theirs, _wait_for_torch(device.name))
    times = interleave(contenders, rounds=rounds, steps=steps, warm_up=4)
    our_s, peer_s = times["ours"], times.get("peer", [])
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
        work=described,
        device=device_name(device),
        unit="tok/s",
        ours=work.tokens / step_s,
        floor=work.tokens / floor_s,
        peer=work.tokens / statistics.median(peer_s) if peer_s else None,
        ratio=paired_ratio(peer_s, our_s) if peer_s else None,
        rounds=rounds,
        versions=versions(),
        detail=detail,
    )


def _described(work: Work, theirs) -> dict:
    shown = {"model": work.model, "batch": work.batch, "seq": work.seq, "precision": work.precision}
    if work.accumulation > 1:
        shown["accumulation"] = work.accumulation
    if work.remat != "none":
        shown["remat"] = work.remat
    return shown | ({"peer": f"torch, {theirs.description}"} if theirs is not None else {})


def _peer(config, work: Work, batch, device: str, how: str):
    """The PyTorch step; UsageError when torch is not installed or cannot do the work."""
    if work.accumulation > 1 or work.remat != "none":
        raise UsageError("--peer: the peer has no accumulation and no remat; leave them out")
    try:
        from peers.torch_model import make_step, strongest_step
    except ModuleNotFoundError:
        raise UsageError("--peer: PyTorch is not installed (pip install 'xtrain[peers]')") from None
    arrays = batch["input_ids"], batch["targets"]
    options = {"device": device, "bf16": work.precision == "bf16", "learning_rate": LEARNING_RATE}
    if how == "compile":
        return strongest_step(config, *arrays, **options)
    return make_step(config, *arrays, mode="eager", words=config.vocab_size, **options)


def _wait_for_torch(device: str):
    import torch

    return torch.cuda.synchronize if device == "cuda" else lambda: None


def _device_detail(device, ours: SizedStep, theirs) -> dict:
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
