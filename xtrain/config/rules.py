"""Which values make sense: the rules that a type cannot express, and what each device can do.

Every refusal is a UsageError of one line that names the key, its value and what would be right.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable

from xtrain.config.files import package_conf_dir
from xtrain.config.schema import Features, RunConfig
from xtrain.data.sources import SOURCES
from xtrain.data.split import LEAST_AND_MOST_HELD_OUT
from xtrain.errors import UsageError
from xtrain.models.config import NUMBERS, SIZES
from xtrain.typed_json import NAME

AXES = ("model", "data", "precision", "infra")
CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "launch": ("single",),
    "data.source": SOURCES,
    "eval.source": SOURCES,
    "optim.schedule": ("cosine", "linear", "constant"),
    "phase.objective": ("next_token", "sft", "dpo", "grpo"),
    "features.gemm": ("tiled", "library"),
    "features.optimizer": ("host", "device"),
    "features.precision": ("fp32", "bf16"),
    "features.remat": ("none", "mlp", "block"),
    "features.attention": ("composed", "flash"),
}
COUNT = 1 << 53  # what a float64 counts exactly; more tokens or steps than anyone has
# The least and the most that a key can be. Below, a run could not take one step; above, a number
# has no meaning on any machine, or no place in the arithmetic.
RANGES = {
    **{f"model.{key}": limits for key, limits in SIZES.items()},
    **{f"model.{key}": limits for key, limits in NUMBERS.items()},
    "train.max_tokens": (1, COUNT),
    "train.batch_size": (1, 1 << 20),
    "train.seq_len": (1, 1 << 24),
    "train.accumulation": (1, 1 << 20),
    "train.log_every_steps": (1, COUNT),
    "train.eval_every_steps": (1, COUNT),
    "train.eval_tokens": (1, COUNT),
    "train.save_every_steps": (1, COUNT),
    "train.keep_last": (1, COUNT),
    "train.sample_tokens": (0, 1 << 20),
    "train.dropout": (0, 0.999),
    "optim.lr": (0, 1e3),
    "optim.min_lr_ratio": (0, 1),
    "optim.eps": (1e-30, 1),
    "optim.weight_decay": (0, 1e3),
    "optim.clip_norm": (0, 1e30),
    "optim.warmup_steps": (0, COUNT),
    "data.workers": (0, 1024),
    "data.max_bytes": (1, 1 << 60),
    "data.order_seed": (0, (1 << 63) - 1),
    "data.shards": (1, 1 << 20),
    "data.heldout_fraction": LEAST_AND_MOST_HELD_OUT,
    "data.heldout_tokens": (1, COUNT),
    "data.reserved_tail_tokens": (1, 1 << 40),
    "decode.max_new_tokens": (1, 1 << 20),
    "decode.temperature": (0, 1e6),
    "decode.top_k": (1, 1 << 31),
    "eval.tokens": (1, 1 << 40),
    "eval.file": (0, 1 << 20),
    "eval.order_seed": (0, (1 << 63) - 1),
    "eval.heldout_fraction": LEAST_AND_MOST_HELD_OUT,
    "seed": (0, (1 << 64) - 1),
}
# Half-open intervals [low, high).
FRACTIONS = ("optim.beta1", "optim.beta2")
# These become parts of paths, or stand beside those that do in the records.
NAMES = ("data.name", "eval.name", "phase.name", "parent")
# Declared, because phases will name them, but nothing trains with them yet.
OBJECTIVES_NOT_BUILT = ("sft", "dpo", "grpo")
# Of paths: what Linux and macOS take, and the longest that a run makes below `out`.
LONGEST_NAME = 255
LONGEST_PATH = os.pathconf("/", "PC_PATH_MAX")
BELOW_OUT = 512

DEVICE_BEST = {
    "cpu": Features(
        gemm="library",
        optimizer="host",
        op_sync=True,
        batched=True,
        pool=False,
        capture=False,
        precision="fp32",
        remat="none",
        attention="composed",
    ),
    "cuda": Features(
        gemm="library",
        optimizer="device",
        op_sync=False,
        batched=True,
        pool=True,
        capture=True,
        precision="bf16",
        remat="none",
        attention="flash",
    ),
}
# On a CPU every op has finished when it returns, so op_sync=false is what it cannot do.
CUDA_ONLY = {
    "optimizer": "device",
    "op_sync": False,
    "pool": True,
    "capture": True,
    "precision": "bf16",
    "attention": "flash",
}
FLASH_HEAD_DIMS = range(16, 129, 16)  # of its kernels


def check_run(run: RunConfig) -> None:
    """Refuse values that no device could train with. Raises UsageError, one line."""
    for key, allowed in CHOICES.items():
        value = _at(run, key)
        if value is not None and value not in allowed:
            raise UsageError(f"{key}={value}: {_choose(str(value), allowed)}")
    for key, (least, most) in RANGES.items():
        _check_range(key, _at(run, key), least, most)
    for key in FRACTIONS:
        if not 0 <= _at(run, key) < 1:
            raise UsageError(f"{key}={_at(run, key)} is outside [0, 1)")
    for key in NAMES:
        value = _at(run, key)
        if value is not None and not re.fullmatch(NAME.pattern, value):
            raise UsageError(f"{key}={value[:80]!r} is not {NAME.words}")
    if run.phase.objective in OBJECTIVES_NOT_BUILT:
        raise UsageError(
            f"phase.objective={run.phase.objective} is not built yet; there is next_token"
        )
    if not run.out.strip():
        raise UsageError("out is empty; out=. is the working directory")
    _check_length(run.out)
    for rule in (
        _check_name,
        _check_model,
        _check_batch,
        _check_schedule,
        _check_parent,
        _check_data,
        _check_use,
    ):
        rule(run)


def _check_range(key: str, value: float | None, least: float, most: float) -> None:
    if value is None or least <= value <= most:
        return
    shown = str(value) if abs(value) < 1 << 80 else f"{value:.3g}"
    if not value >= least:
        raise UsageError(f"{key}={shown} is below {least:g}, the least it can be")
    raise UsageError(f"{key}={shown} is above {most}, the most it can be")


def check_features(run: RunConfig, device_class: str) -> None:
    """Refuse what `cpu` or `cuda` cannot do. Raises UsageError naming key and value.

    A feature left at None is never refused: it means the device's best.
    """
    if device_class not in run.phase.device_classes:
        needed = " or ".join(run.phase.device_classes)
        raise UsageError(f"phase={run.phase.name} needs device={needed}, this is {device_class}")
    if device_class == "cuda":
        _check_flash(run)
        return
    for key, value in CUDA_ONLY.items():
        if getattr(run.features, key) == value:
            instead = _written(getattr(DEVICE_BEST["cpu"], key))
            raise UsageError(
                f"features.{key}={_written(value)} needs device=cuda; "
                f"on a CPU say features.{key}={instead}"
            )


def _check_flash(run: RunConfig) -> None:
    head_dim = run.model.head_dim
    if run.features.attention == "flash" and head_dim not in FLASH_HEAD_DIMS:
        raise UsageError(
            f"features.attention=flash needs model.head_dim a multiple of {FLASH_HEAD_DIMS.step} "
            f"up to {FLASH_HEAD_DIMS[-1]}, this is {head_dim}; say features.attention=composed"
        )


def resolve_features(run: RunConfig, device_class: str) -> Features:
    """The features with every None replaced by the device's best for the run's model.

    Raises UsageError as check_features does.
    """
    check_features(run, device_class)
    if run.features.attention is None and run.model.head_dim not in FLASH_HEAD_DIMS:
        run = dataclasses.replace(
            run, features=dataclasses.replace(run.features, attention="composed")
        )
    return best_features(run.features, device_class)


def best_features(features: Features, device_class: str) -> Features:
    """The features with every None replaced by the device's best; nothing is refused."""
    best = DEVICE_BEST[device_class]
    unset = {
        field.name: getattr(best, field.name)
        for field in dataclasses.fields(Features)
        if getattr(features, field.name) is None
    }
    return dataclasses.replace(features, **unset)


def _check_name(run: RunConfig) -> None:
    """A name is that of a folder and of a registered model, and one of the package's is its own."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}", run.name):
        raise UsageError(
            f"name={run.name}: letters, digits, _ . and - only, a letter or digit first"
        )
    taken = {path.stem for path in (package_conf_dir() / "run").glob("*.yaml")} - {run.name}
    if run.name.lower() in taken:
        raise UsageError(f"name={run.name}: it would pass for the package's run {run.name.lower()}")


def _check_length(out: str) -> None:
    """A path that no file system takes is refused here, before half of it is written."""
    path = os.fsencode(os.path.abspath(out))
    said = out if len(out) <= 60 else f"{out[:60]}... ({len(out):,} characters)"
    if "\0" in out:
        raise UsageError("out holds a NUL character, which no path can")
    if max(map(len, path.split(b"/"))) > LONGEST_NAME:
        raise UsageError(f"out={said}: a name in it is longer than {LONGEST_NAME} bytes")
    if len(path) > LONGEST_PATH - BELOW_OUT:
        raise UsageError(f"out={said}: longer than {LONGEST_PATH - BELOW_OUT} bytes; use less")


def _check_model(run: RunConfig) -> None:
    model = run.model
    if model.num_attention_heads % model.num_key_value_heads:
        raise UsageError(
            f"model.num_attention_heads={model.num_attention_heads} is not a multiple of "
            f"model.num_key_value_heads={model.num_key_value_heads}"
        )
    if model.head_dim % 2:
        raise UsageError(f"model.head_dim={model.head_dim} is odd, and RoPE rotates pairs")


def _check_batch(run: RunConfig) -> None:
    model, train = run.model, run.train
    if train.seq_len > model.max_position_embeddings:
        raise UsageError(
            f"train.seq_len={train.seq_len} is longer than "
            f"model.max_position_embeddings={model.max_position_embeddings}"
        )
    if train.eval_tokens < train.seq_len:
        raise UsageError(
            f"train.eval_tokens={train.eval_tokens} is less than one sequence, "
            f"train.seq_len={train.seq_len}"
        )
    if train.max_tokens < run.train.tokens_per_step:
        raise UsageError(
            f"train.max_tokens={train.max_tokens} is less than one step: train.accumulation="
            f"{train.accumulation} x train.batch_size={train.batch_size} x train.seq_len="
            f"{train.seq_len} = {run.train.tokens_per_step}"
        )


def _check_schedule(run: RunConfig) -> None:
    optim = run.optim
    if optim.warmup_steps and optim.warmup_steps >= run.train.total_steps:
        raise UsageError(
            f"optim.warmup_steps={optim.warmup_steps} is not less than the "
            f"{run.train.total_steps} steps of train.max_tokens={run.train.max_tokens}"
        )


def _check_parent(run: RunConfig) -> None:
    for axis in run.axes:
        if axis not in AXES:
            raise UsageError(f"axes holds {axis}: {_choose(axis, AXES)}")
    if bool(run.axes) != bool(run.parent):
        raise UsageError(f"parent={run.parent} and axes={run.axes}: a run has both or neither")


def _check_data(run: RunConfig) -> None:
    data = run.data
    if data.source == "text" and not data.path:
        raise UsageError("data=text needs data.path=FILE_OR_DIR (.txt, .jsonl or .parquet)")


def _check_use(run: RunConfig) -> None:
    """What phase=decode and phase=eval are asked for."""
    decode, chosen = run.decode, run.eval
    if decode.top_p is not None and not 0 < decode.top_p <= 1:
        raise UsageError(f"decode.top_p={decode.top_p} is outside (0, 1]")
    if chosen.source == "text" and not chosen.path:
        raise UsageError("eval=text needs eval.path=FILE_OR_DIR (.txt, .jsonl or .parquet)")


def nearest(name: str, names: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """The closest of some names, or None when none is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return close[0] if close else None


def _choose(value: str, allowed: Iterable[str]) -> str:
    near = nearest(value, allowed)
    hint = f" (nearest: {near})" if near else ""
    return f"choose one of {', '.join(allowed)}{hint}"


def _at(run: RunConfig, key: str):
    value = run
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _written(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else value
