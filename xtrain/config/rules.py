"""Which values make sense: the rules that a type cannot express, and what each device can do.

Every refusal is a UsageError of one line that names the key, its value and what would be right.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable

from xtrain.config.files import package_conf_dir
from xtrain.config.schema import Features, RunConfig
from xtrain.data.sources import SOURCES
from xtrain.errors import UsageError

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
# Smallest value a key may have; below it the run could not take one step.
LEAST = {
    "model.hidden_size": 1,
    "model.intermediate_size": 1,
    "model.num_hidden_layers": 1,
    "model.num_attention_heads": 1,
    "model.num_key_value_heads": 1,
    "model.head_dim": 2,
    "model.max_position_embeddings": 1,
    "model.vocab_size": 1,
    "train.max_tokens": 1,
    "train.batch_size": 1,
    "train.seq_len": 1,
    "train.accumulation": 1,
    "train.log_every_steps": 1,
    "train.eval_every_steps": 1,
    "train.eval_tokens": 1,
    "train.save_every_steps": 1,
    "train.keep_last": 1,
    "train.sample_tokens": 0,
    "optim.weight_decay": 0,
    "optim.clip_norm": 0,
    "optim.warmup_steps": 0,
    "data.workers": 0,
    "decode.max_new_tokens": 1,
    "decode.temperature": 0,
    "eval.tokens": 1,
    "seed": 0,
}
POSITIVE = ("model.rms_norm_eps", "model.rope_theta", "model.initializer_range", "optim.eps")
# Half-open intervals [low, high); `optim.min_lr_ratio` may also be 1.
FRACTIONS = ("train.dropout", "optim.beta1", "optim.beta2")

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
        attention="composed",
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
# Declared, because runs and phases name them, but not built on any device yet.
NOT_BUILT = {"attention": "flash"}


def check_run(run: RunConfig) -> None:
    """Refuse values that no device could train with. Raises UsageError, one line."""
    values = {key: _at(run, key) for key in (*CHOICES, *LEAST, *POSITIVE, *FRACTIONS)}
    for key, allowed in CHOICES.items():
        if values[key] is not None and values[key] not in allowed:
            raise UsageError(f"{key}={values[key]}: {_choose(str(values[key]), allowed)}")
    for key, least in LEAST.items():
        if not values[key] >= least:
            raise UsageError(f"{key}={values[key]} is below {least}, the least it can be")
    for key in POSITIVE:
        if not 0 < values[key] < math.inf:
            raise UsageError(f"{key}={values[key]} is not a positive number")
    for key in FRACTIONS:
        if not 0 <= values[key] < 1:
            raise UsageError(f"{key}={values[key]} is outside [0, 1)")
    if run.seed >= 1 << 64:
        raise UsageError(f"seed={run.seed} is not below 2^64")
    if not run.out.strip():
        raise UsageError("out is empty; out=. is the working directory")
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


def check_features(run: RunConfig, device_class: str) -> None:
    """Refuse what `cpu` or `cuda` cannot do. Raises UsageError naming key and value.

    A feature left at None is never refused: it means the device's best.
    """
    if device_class not in run.phase.device_classes:
        needed = " or ".join(run.phase.device_classes)
        raise UsageError(f"phase={run.phase.name} needs device={needed}, this is {device_class}")
    if device_class == "cuda":
        _check_built(run.features)
        return
    for key, value in CUDA_ONLY.items():
        if getattr(run.features, key) == value:
            instead = _written(getattr(DEVICE_BEST["cpu"], key))
            raise UsageError(
                f"features.{key}={_written(value)} needs device=cuda; "
                f"on a CPU say features.{key}={instead}"
            )


def _check_built(features: Features) -> None:
    for key, value in NOT_BUILT.items():
        if getattr(features, key) == value:
            instead = _written(getattr(DEVICE_BEST["cuda"], key))
            raise UsageError(
                f"features.{key}={_written(value)} is not built yet; "
                f"say features.{key}={instead} or null"
            )


def resolve_features(run: RunConfig, device_class: str) -> Features:
    """The features with every None replaced by the device's best.

    Raises UsageError as check_features does.
    """
    check_features(run, device_class)
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
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", run.name):
        raise UsageError(
            f"name={run.name}: letters, digits, _ . and - only, a letter or digit first"
        )
    taken = {path.stem for path in (package_conf_dir() / "run").glob("*.yaml")} - {run.name}
    if run.name.lower() in taken:
        raise UsageError(f"name={run.name}: it would pass for the package's run {run.name.lower()}")


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
    if not 0 <= optim.lr < math.inf:
        raise UsageError(f"optim.lr={optim.lr} is not a learning rate")
    if not 0 <= optim.min_lr_ratio <= 1:
        raise UsageError(f"optim.min_lr_ratio={optim.min_lr_ratio} is outside [0, 1]")
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
    if not 0 < data.heldout_fraction <= 0.5:
        raise UsageError(f"data.heldout_fraction={data.heldout_fraction} is outside (0, 0.5]")
    for key in ("max_bytes", "shards", "heldout_tokens"):
        value = getattr(data, key)
        if value is not None and value < 1:
            raise UsageError(f"data.{key}={value} is below 1, the least it can be")


def _check_use(run: RunConfig) -> None:
    """What phase=decode and phase=eval are asked for."""
    decode, chosen = run.decode, run.eval
    if decode.temperature == math.inf:
        raise UsageError(f"decode.temperature={decode.temperature} is not a finite number")
    if decode.top_k is not None and decode.top_k < 1:
        raise UsageError(f"decode.top_k={decode.top_k} is below 1, the least it can be")
    if decode.top_p is not None and not 0 < decode.top_p <= 1:
        raise UsageError(f"decode.top_p={decode.top_p} is outside (0, 1]")
    if chosen.source == "text" and not chosen.path:
        raise UsageError("eval=text needs eval.path=FILE_OR_DIR (.txt, .jsonl or .parquet)")
    if chosen.file is not None and chosen.file < 0:
        raise UsageError(f"eval.file={chosen.file} is below 0, the least it can be")
    if chosen.heldout_fraction is not None and not 0 < chosen.heldout_fraction <= 0.5:
        raise UsageError(f"eval.heldout_fraction={chosen.heldout_fraction} is outside (0, 0.5]")


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
