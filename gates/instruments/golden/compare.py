"""Compare this engine with the reference values in this folder, or with transformers itself.

Each function takes a device class (`cpu` or `cuda`), computes in fp32 and returns measured numbers
by name. None of them needs torch, but `closed_loop` with `ask`.
"""

import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from gates.instruments.golden.reference import (
    GREEDY_PROMPTS,
    MODELS,
    OPTIM,
    TRAJECTORY,
    TRAJECTORY_FILE,
    GoldenModel,
    read,
)
from xtrain.engine import device as devices
from xtrain.engine.params import FlatBuffers, Parameter
from xtrain.engine.testing import worst
from xtrain.infer.generate import generate
from xtrain.models.config import Qwen3Config
from xtrain.models.hf import export, named_tensors
from xtrain.models.hf_import import load_hf, read_config
from xtrain.models.qwen3 import Qwen3
from xtrain.train import loop
from xtrain.train.config import OptimConfig, TrainConfig
from xtrain.train.learner import Learner
from xtrain.train.objectives.next_token import next_token
from xtrain.train.optimizer import AdamW

PROMPTS, NEW_TOKENS = 8, 64  # of the closed loop


def golden_values(device: str) -> dict[str, float]:
    """Loss, logits, gradients and ten steps against stored values; the worst model counts.

    golden_loss_rel, golden_ten_steps_rel: relative.  golden_logits_max_abs: absolute.
    golden_worst_grad_rel_l2: relative L2 distance of the parameter that is furthest off.
    """
    measured = [golden_model_values(golden, device) for golden in MODELS]
    return {name: worst(m[name] for m in measured) for name in measured[0]}


def golden_model_values(golden: GoldenModel, device: str) -> dict[str, float]:
    """The same for one of the stored models."""
    here, stored = devices.use(device), read(golden.file)
    tokens = stored["tokens"].astype(np.int32)
    targets = np.where(stored["ignored"], -100, tokens[:, :, 1:]).astype(np.int32)
    batches = [
        {"input_ids": np.ascontiguousarray(ids[None, :, :-1]), "targets": wanted[None]}
        for ids, wanted in zip(tokens, targets, strict=True)
    ]
    model, buffers = golden_model(golden, stored, device)
    batch = {name: here.array(array[0]) for name, array in batches[0].items()}
    logits = here.host(model.logits(model(batch["input_ids"])).data)
    scale = np.float32(1 / (targets[0] >= 0).sum())
    loss = next_token(model, batch, here.array(np.asarray(scale)), None)
    loss.backward()
    gradients = named_tensors(buffers, buffers.grad)
    return {
        "golden_loss_rel": _relative(float(loss), stored["loss"]),
        "golden_logits_max_abs": float(np.abs(logits - stored["logits"]).max()),
        "golden_worst_grad_rel_l2": worst(
            _relative(here.host(gradient), stored[f"grad/{name}"])
            for name, gradient in gradients.items()
        ),
        "golden_ten_steps_rel": _worst_loss(_ten_steps(golden, stored, batches, device), stored),
    }


def golden_model(golden: GoldenModel, stored: dict, device: str) -> tuple[Qwen3, FlatBuffers]:
    """A stored model with its reference weights, on a device."""
    here = devices.use(device)
    model = Qwen3(golden.config)
    buffers = FlatBuffers(model.named_parameters(), here)
    for name, view in named_tensors(buffers, buffers.master).items():
        widened = stored[f"weight/{name}"].astype(np.uint32) << 16  # bf16 to fp32
        view[...] = here.array(widened.view(np.float32))
    return model, buffers


def _ten_steps(golden: GoldenModel, stored: dict, batches: list[dict], device: str) -> list[float]:
    """The losses of the training loop itself, on the stored batches instead of windows."""
    here = devices.use(device)
    model, buffers = golden_model(golden, stored, device)
    step = Learner(model, buffers, AdamW(buffers, OPTIM, here), here).step(next_token, seed=0)
    losses: list[float] = []
    _, rows, length = batches[0]["input_ids"].shape
    loop.train(
        step,
        SimpleNamespace(batch=lambda number: batches[number], epoch=lambda number: 0.0),
        start=0,
        train_config=TrainConfig(
            max_tokens=len(batches) * rows * length,
            batch_size=rows,
            seq_len=length,
            log_every_steps=1,
        ),
        optim_config=OPTIM,
        hooks=loop.Hooks(
            log=lambda number, values: losses.append(values["loss"]),
            evaluate=lambda number: None,
            save=lambda number: None,
            stop=lambda: None,
        ),
    )
    return losses


def _worst_loss(losses: list[float], stored: dict) -> float:
    pairs = zip(losses, stored["losses"], strict=True)
    return worst(_relative(ours, truth) for ours, truth in pairs)


def adamw_100_steps(device: str) -> dict[str, float]:
    """A parameter vector under torch's AdamW over 100 steps, with eps 1e-8 and 1e-3.

    adamw_100_steps_rel: the worst relative L2 distance after any tenth step, of the elements with
    tiny gradients and of the others apart, since the first are far smaller.
    """
    stored = read(TRAJECTORY_FILE)
    found: list[float] = []
    for eps in TRAJECTORY.eps:
        ours = _adamw_path(stored, eps, device)
        truth = stored[f"path/{eps}"]
        for group in (stored["tiny"], ~stored["tiny"]):
            errors = [_relative(a[group], b[group]) for a, b in zip(ours, truth, strict=True)]
            found += errors
    return {"adamw_100_steps_rel": worst(found)}


def _adamw_path(stored: dict, eps: float, device: str) -> list[np.ndarray]:
    here, t = devices.use(device), TRAJECTORY
    sizes = {"decayed": t.decayed, "kept": t.size - t.decayed}
    parameters = [(n, Parameter((s,), std=None, decay=n == "decayed")) for n, s in sizes.items()]
    buffers = FlatBuffers(parameters, here)
    halves = [buffers.view(buffers.master, name) for name in sizes]
    config = OptimConfig(t.lr, t.beta1, t.beta2, eps, t.weight_decay, clip_norm=0)
    optimizer = AdamW(buffers, config, here)
    optimizer.lr[...] = t.lr
    for half, start in zip(halves, np.split(stored["start"], [t.decayed]), strict=True):
        half[...] = here.array(start)
    path = []
    for step, gradient in enumerate(stored["gradients"]):
        for name, part in zip(sizes, np.split(gradient, [t.decayed]), strict=True):
            buffers.view(buffers.grad, name)[...] = here.array(part)
        optimizer.update()
        if step == 0 or (step + 1) % 10 == 0:
            path.append(np.concatenate([here.host(half).copy() for half in halves]))
    return path


def golden_greedy(device: str) -> dict[str, float]:
    """Greedy tokens of the stored models, exported and read back, against transformers'.

    golden_greedy_mismatches: tokens that differ, of 8 prompts x 64 tokens a model.
    """
    mismatches = 0
    for golden in MODELS:
        stored = read(golden.file)
        model, buffers = golden_model(golden, stored, device)
        with tempfile.TemporaryDirectory() as folder:
            _export(model, buffers, Path(folder, "export"))
            again, _ = imported(Path(folder, "export"), device)
        mismatches += _mismatches(_greedy(again, GREEDY_PROMPTS), stored["greedy"])
    return {"golden_greedy_mismatches": float(mismatches)}


def imported(directory: Path, device: str) -> tuple[Qwen3, FlatBuffers]:
    """The model of a Hugging Face directory, on a device."""
    here = devices.use(device)
    model = Qwen3(read_config(directory))
    buffers = FlatBuffers(model.named_parameters(), here)
    load_hf(directory, buffers, here)
    return model, buffers


def export_values(device: str, config: Qwen3Config = MODELS[0].config) -> dict[str, float]:
    """What interchange must keep, on random weights; nothing but this engine is needed.

    export_files_differing: files whose sha256 differs between two exports.
    round_trip_tensors_differing: tensors that are not bit for bit the same after import and export.
    """
    model, buffers = random_model(config, device)
    with tempfile.TemporaryDirectory() as folder:
        first = _export(model, buffers, Path(folder, "first"))
        second = _export(model, buffers, Path(folder, "second"))
        again, read_back = imported(Path(folder, "first"), device)
        third = _export(again, read_back, Path(folder, "third"))
    ours, theirs = (named_tensors(b, b.master) for b in (buffers, read_back))
    host = devices.use(device).host
    return {
        "export_files_differing": float(_differing(first, second) + _differing(first, third)),
        "round_trip_tensors_differing": float(
            _differing(
                {name: host(view).tobytes() for name, view in ours.items()},
                {name: host(view).tobytes() for name, view in theirs.items()},
            )
        ),
    }


def closed_loop(
    device: str,
    config: Qwen3Config = MODELS[0].config,
    *,
    tokenizer_writer: Callable[[Path], object] | None = None,
) -> dict[str, float]:
    """Export random weights, load them with transformers, and compare what both say.

    closed_loop_complaints: warnings of loading.  closed_loop_logits_max_abs: over 8 prompts.
    closed_loop_greedy_mismatches: tokens that differ, of 8 x 64.
    Raises ModuleNotFoundError without torch and transformers; see `can_ask`.
    """
    from gates.instruments.golden.make_golden import ask

    model, buffers = random_model(config, device)
    source = np.random.default_rng(3)
    prompts = [source.integers(0, config.vocab_size, n).tolist() for n in range(1, 4 * PROMPTS, 4)]
    with tempfile.TemporaryDirectory() as folder:
        _export(model, buffers, Path(folder, "export"), tokenizer_writer or small_tokenizer)
        answer = ask(Path(folder, "export"), prompts, new_tokens=NEW_TOKENS)
    here = devices.use(device)
    distances = [
        np.abs(here.host(model.logits(model(here.array(np.int32([p])))).data)[0] - logits).max()
        for p, logits in zip(prompts, answer["logits"], strict=True)
    ]
    return {
        "closed_loop_complaints": float(len(answer["complaints"])),
        "closed_loop_logits_max_abs": worst(distances),
        "closed_loop_greedy_mismatches": float(
            _mismatches(_greedy(model, prompts), np.array(answer["greedy"]))
        ),
    }


def can_ask() -> bool:
    """Whether torch and transformers are installed, which `closed_loop` needs."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def random_model(config: Qwen3Config, device: str) -> tuple[Qwen3, FlatBuffers]:
    """A model with wide random weights, so that every path through it shows in the logits."""
    here = devices.use(device)
    model = Qwen3(config)
    buffers = FlatBuffers(model.named_parameters(), here)
    source = np.random.default_rng(5)
    for view in named_tensors(buffers, buffers.master).values():
        drawn = 0.25 * source.standard_normal(view.shape)
        view[...] = here.array((drawn if view.ndim == 2 else 1 + drawn).astype(np.float32))
    return model, buffers


def _export(model, buffers, directory: Path, tokenizer_writer=None) -> dict[str, str]:
    writer = tokenizer_writer or (lambda folder: None)
    return export(model, buffers, directory, tokenizer_writer=writer, eos_token_id=0)


def small_tokenizer(directory: Path) -> None:
    """Sixty-four one-character words, so that transformers finds a tokenizer beside the model."""
    vocab = {chr(33 + i): i for i in range(64)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "!"}
    content = {"version": "1.0", "added_tokens": [], "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "!"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _greedy(model: Qwen3, prompts: list[list[int]]) -> list[list[int]]:
    return generate(model, prompts, max_new_tokens=NEW_TOKENS)


def _mismatches(ours: list[list[int]], truth: np.ndarray) -> int:
    return int((np.array(ours) != truth).sum())


def _differing(a: dict, b: dict) -> int:
    return sum(a.get(name) != b.get(name) for name in a.keys() | b.keys())


def _relative(value, truth) -> float:
    """L2 distance over the truth's L2 norm, in float64; NaN if the value is."""
    value, truth = (np.asarray(a, np.float64) for a in (value, truth))
    return float(np.linalg.norm(value - truth) / np.linalg.norm(truth))
