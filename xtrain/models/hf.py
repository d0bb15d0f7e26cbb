"""Write a model as a Hugging Face Qwen3 directory; `hf_import` reads one.

    config.json  model.safetensors  generation_config.json  + the tokenizer's files

Weights are the fp32 masters under Hugging Face's names: fused products split into q/k/v and
gate/up, padding rows left out, no `lm_head.weight` when the head is the embedding. Files hold no
time, host or version, so the same model gives the same sha256 of every file. Versions 4 and 5 of
`transformers` spell two keys differently; both spellings are written.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from xtrain.engine import device
from xtrain.engine.params import FlatBuffers, part_rows
from xtrain.errors import UsageError
from xtrain.models.config import Qwen3Config
from xtrain.models.qwen3 import Qwen3
from xtrain.models.tensor_file import write_tensors

ARCHITECTURE = "Qwen3ForCausalLM"
CONFIG, WEIGHTS, GENERATION = "config.json", "model.safetensors", "generation_config.json"


def export(
    model: Qwen3,
    buffers: FlatBuffers,
    directory: Path,
    *,
    tokenizer_writer: Callable[[Path], object],
    eos_token_id: int,
) -> dict[str, str]:
    """Write the directory and return {file name: sha256}.

    tokenizer_writer: called with a directory, writes the tokenizer's files into it.
    eos_token_id: the id that ends a text, and that a text starts after.
    An earlier export in the same place is replaced; nothing half-written is ever under the final
    name. Raises UsageError for a model that is not a Qwen3 (no qk_norm) and for a directory that
    holds something else than an export.
    """
    if any(block.self_attn.q_norm is None for block in model.layers):
        raise UsageError("features.qk_norm=false: such a model is not a Qwen3, it has no export")
    final = Path(directory)
    _require_replaceable(final)
    temporary = final.with_name(f".{final.name}.writing-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_json(temporary / CONFIG, config_dict(model.config, eos_token_id=eos_token_id))
        _write_json(temporary / GENERATION, _generation_dict(eos_token_id))
        save_weights(buffers, temporary / WEIGHTS)
        tokenizer_writer(temporary)
        hashes = {path.name: _sha256(path) for path in sorted(temporary.iterdir())}
        _rename_over(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return hashes


def named_tensors(buffers: FlatBuffers, buffer) -> dict[str, object]:
    """Hugging Face name -> view of its rows in one of the flat buffers, padding left out."""
    found = {}
    for name, parameter in buffers.parameters.items():
        view = buffers.view(buffer, name)
        for part, start, rows in part_rows(name, parameter):
            full = part if part.startswith("lm_head") else f"model.{part}"
            found[full] = view[start : start + rows]
    return found


def save_weights(buffers: FlatBuffers, path: Path) -> None:
    """Write the fp32 master weights as one safetensors file."""
    tensors = named_tensors(buffers, buffers.master)
    write_tensors(path, tensors, device.current().host, metadata={"format": "pt"})


def config_dict(config: Qwen3Config, *, eos_token_id: int) -> dict:
    """The content of config.json."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_hidden_layers,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "use_cache": True,
        "torch_dtype": "float32",
        "dtype": "float32",
        "bos_token_id": eos_token_id,
        "eos_token_id": eos_token_id,
    }


def _generation_dict(eos_token_id: int) -> dict:
    # Without a pad id `generate` warns on every call; here, unlike in config.json, it does not make
    # torch drop the gradient of that embedding row.
    return {
        "bos_token_id": eos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": eos_token_id,
        "do_sample": False,
    }


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _require_replaceable(directory: Path) -> None:
    if directory.is_dir():
        is_export = (directory / CONFIG).is_file() and (directory / WEIGHTS).is_file()
        has_directories = any(path.is_dir() for path in directory.iterdir())
        if any(directory.iterdir()) and (has_directories or not is_export):
            raise UsageError(f"{directory} is not an export; choose an empty or absent directory")
    elif directory.exists():
        raise UsageError(f"{directory} is a file; an export is a directory")


def _rename_over(temporary: Path, final: Path) -> None:
    if not final.exists():
        temporary.rename(final)
        return
    replaced = final.with_name(f".{final.name}.replaced-{os.getpid()}")
    shutil.rmtree(replaced, ignore_errors=True)
    final.rename(replaced)
    temporary.rename(final)
    shutil.rmtree(replaced)


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
