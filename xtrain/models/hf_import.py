"""Read a Hugging Face directory of a dense Qwen3: its shape, and its weights into flat buffers.

Any head_dim, tied or untied, one safetensors file or shards with an index, bf16, fp16 or fp32
(widened to the fp32 masters, which is exact). What this model cannot compute is refused by name:
other architectures, mixtures of experts, sliding windows in use, scaled RoPE, biases, quantized
weights, and a missing or left-over tensor.
"""

import json
import math
import os
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from xtrain.engine import device as devices
from xtrain.engine.device import Device
from xtrain.engine.params import FlatBuffers
from xtrain.errors import UsageError
from xtrain.models.config import NUMBERS, SIZES, Qwen3Config
from xtrain.models.counts import count_parameters
from xtrain.models.hf import ARCHITECTURE, CONFIG, WEIGHTS, named_tensors
from xtrain.models.tensor_file import Stored, has_bits_of, put, read_header
from xtrain.typed_json import Between, Within, read_json

INDEX = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
_COUNT = Between(0, 2**53)
# What is read of config.json: what kind of model it is, and then its sizes.
KIND = {
    "model_type?": str,
    "architectures?": (None, [str]),
    "layer_types?": (None, [str]),
    "num_hidden_layers?": _COUNT,
    "use_sliding_window?": (None, bool),
    "sliding_window?": (None, _COUNT),
    "max_window_layers?": _COUNT,
}
SHAPE = {
    **{key: Between(*limits) for key, limits in SIZES.items()},
    "rms_norm_eps": Within(*NUMBERS["rms_norm_eps"]),
    "rope_theta?": (None, Within(*NUMBERS["rope_theta"])),
    "initializer_range?": Within(*NUMBERS["initializer_range"]),
    "tie_word_embeddings?": bool,
    "rope_scaling?": (None, dict),
    "rope_parameters?": (None, dict),
}
ROPE_SHAPE = {
    "rope_type?": str,
    "type?": str,
    "rope_theta?": Within(*NUMBERS["rope_theta"]),
}
INDEX_SHAPE = {"weight_map": {str: str}}
# Keys that change the computation, and the only values that this model computes; absent is fine.
REQUIRED_VALUES = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "partial_rotary_factor": (None, 1),
    "quantization_config": (None,),
    "auto_map": (None,),
}


def read_config(directory: Path) -> Qwen3Config:
    """The shape of the model in a Hugging Face directory.

    Raises UsageError naming the key, its value and what is supported.
    """
    path = Path(directory) / CONFIG
    found = _read_json(path, KIND)
    _require_dense_qwen3(path, found)
    found = _read_json(path, SHAPE)
    sizes = {key: found[key] for key in SIZES}
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        _refuse(path, found, "num_key_value_heads", "it must divide num_attention_heads")
    if sizes["head_dim"] % 2:
        _refuse(path, found, "head_dim", "it must be even, because RoPE rotates pairs")
    return Qwen3Config(
        **sizes,
        rms_norm_eps=float(found["rms_norm_eps"]),
        rope_theta=_rope_theta(path, found),
        tie_word_embeddings=found.get("tie_word_embeddings", False),
        initializer_range=float(found.get("initializer_range", 0.02)),
    )


def require_weights(directory: Path, config: Qwen3Config) -> None:
    """Refuse weights that are fewer than their config.json says, before a model is made of it.

    Only the files' headers are read, which the reader checks against the files' sizes.
    """
    directory = Path(directory)
    held = 0
    for path in _files(directory):
        with _open(path) as file:
            shapes = (file.get_slice(name).get_shape() for name in file.keys())  # noqa: SIM118
            held += sum(math.prod(shape) for shape in shapes)
    needed = count_parameters(config, qk_norm=True).total
    if held < needed:
        raise UsageError(f"{directory}: {held} weights, {CONFIG} makes them {needed}")


def load_hf(directory: Path, buffers: FlatBuffers, device: Device) -> None:
    """Put the weights of a Hugging Face directory into the buffers of a model of its shape.

    Names and shapes are all checked before anything is written. Raises UsageError naming the
    tensor that is missing, left over, of another shape, of an unsupported dtype or not finite.
    """
    directory = Path(directory)
    views = named_tensors(buffers, buffers.master)
    files = _files(directory)
    where = _locate(files)
    _check_index(directory, where)
    missing = sorted(views.keys() - where.keys())
    if missing:
        raise UsageError(f"{directory}: no tensor {_first(missing)}")
    tied_copy = "lm_head.weight" not in views and "lm_head.weight" in where
    extra = sorted(where.keys() - views.keys() - ({"lm_head.weight"} if tied_copy else set()))
    if extra:
        raise UsageError(f"{directory}: tensor {_first(extra)} has no place in a dense Qwen3")
    for path in files:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                _check_tensor(path, name, file.get_slice(name), views.get(name))
    if tied_copy:
        _require_equal(where, "lm_head.weight", "model.embed_tokens.weight")
    for path in files:
        for name, stored in read_header(path).items():
            if name in views:
                put(stored, views[name], partial(_finite, name, stored, device))
    buffers.refresh_copy()


def _finite(name: str, stored: Stored, device: Device, piece: np.ndarray):
    """A piece of a tensor on the device."""
    if not np.isfinite(piece.sum(dtype=np.float64)):  # no finite sum overflows
        raise UsageError(f"{stored.path}: {name} holds a NaN or infinity")
    return device.array(piece)


def differing_tensors(buffers: FlatBuffers, directory: Path) -> list[str]:
    """Names of the tensors whose bits in a Hugging Face directory are not those of the model."""
    read_config(directory)
    host = devices.current().host
    ours = named_tensors(buffers, buffers.master)
    files = _files(directory)
    _locate(files)  # each is whole, and holds no tensor of another
    theirs = {name: stored for path in files for name, stored in read_header(path).items()}
    return sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours or name not in theirs or not has_bits_of(theirs[name], ours[name], host)
    )


def _require_dense_qwen3(path: Path, found: dict) -> None:
    if found.get("model_type") != "qwen3":
        _refuse(
            path, found, "model_type", "only dense qwen3 is supported (no MoE, no other family)"
        )
    if found.get("architectures") not in (None, [ARCHITECTURE]):
        _refuse(path, found, "architectures", f"only {ARCHITECTURE} is supported")
    for key, allowed in REQUIRED_VALUES.items():
        if key in found and found[key] not in allowed:
            _refuse(path, found, key, f"only {allowed[-1]!r} is supported")
    if _windowed_layers(found):
        key = "layer_types" if "layer_types" in found else "use_sliding_window"
        _refuse(path, found, key, "layers with sliding windows are not supported")


def _windowed_layers(found: dict) -> bool:
    """Whether any layer attends through a window, by the rule of transformers' Qwen3Config."""
    if found.get("layer_types") is not None:
        return any(kind != "full_attention" for kind in found["layer_types"])
    layers = found.get("num_hidden_layers") or 0
    window = found.get("sliding_window", 4096) if found.get("use_sliding_window") else None
    return window is not None and found.get("max_window_layers", 28) < layers


def _rope_theta(path: Path, found: dict) -> float:
    """The RoPE base, from either spelling; scaled or per-layer-type RoPE is refused."""
    bases = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = found.get(key)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.keys() - {"rope_type", "type", "rope_theta"}:
            _refuse(path, found, key, "only rope_type 'default', without scaling, is supported")
        if "rope_theta" in rope:
            _read_json(path, {key: ROPE_SHAPE})
            bases[f"{key}.rope_theta"] = float(rope["rope_theta"])
    if found.get("rope_theta") is not None:
        bases["rope_theta"] = float(found["rope_theta"])
    if len(set(bases.values())) != 1:
        stated = ", ".join(f"{key}={value}" for key, value in bases.items()) or "none is given"
        raise UsageError(f"{path}: one rope_theta was expected: {stated}")
    return next(iter(bases.values()))


def _refuse(path: Path, found: dict, key: str, why: str) -> None:
    stated = f"{key}={json.dumps(found[key])}" if key in found else f"no {key}"
    raise UsageError(f"{path}: {stated}: {why}")


def _read_json(path: Path, shape: dict) -> dict:
    try:
        return read_json(path, shape)
    except FileNotFoundError:
        raise UsageError(f"{path.parent} is not a Hugging Face model: no {path.name}") from None


def _files(directory: Path) -> list[Path]:
    """The safetensors files, found as transformers does: one file, else the shards of an index."""
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    if not (directory / INDEX).is_file():
        raise UsageError(f"{directory}: neither {WEIGHTS} nor {INDEX} (only safetensors is read)")
    names = sorted(set(_weight_map(directory / INDEX).values()))
    for name in names:
        # os.path: a name may be longer than any file's
        if Path(name).name != name or not os.path.isfile(directory / name):
            raise UsageError(f"{directory / INDEX}: shard {name[:80]} is not in {directory}")
    return [directory / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    return _read_json(index, INDEX_SHAPE)["weight_map"]


def _locate(files: list[Path]) -> dict[str, Path]:
    where = {}
    for path in files:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                if name in where:
                    raise UsageError(f"{path}: tensor {name} is also in {where[name].name}")
                where[name] = path
    return where


def _check_index(directory: Path, where: dict[str, Path]) -> None:
    if (directory / WEIGHTS).is_file():
        return
    for name, shard in _weight_map(directory / INDEX).items():
        if name not in where or where[name].name != shard:
            raise UsageError(f"{directory / shard}: no tensor {name}, which {INDEX} puts there")


def _open(path: Path):
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is damaged: {error}") from None


def _check_tensor(path: Path, name: str, stored, view) -> None:
    if stored.get_dtype() not in DTYPES:
        raise UsageError(
            f"{path}: {name} is {stored.get_dtype()}, only {', '.join(DTYPES)} are read"
        )
    shape = tuple(stored.get_shape())
    if view is not None and shape != view.shape:
        raise UsageError(f"{path}: {name} is {shape}, config.json makes it {view.shape}")


def _require_equal(where: dict[str, Path], copy: str, original: str) -> None:
    """A tied model may store its head too, as long as it is the embedding."""
    pair = [read_header(where[name])[name].pieces() for name in (copy, original)]
    if not all(np.array_equal(a, b) for (_, a), (_, b) in zip(*pair, strict=True)):
        raise UsageError(f"{where[copy]}: tie_word_embeddings=true, but {copy} is not {original}")


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
