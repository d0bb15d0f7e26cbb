"""T9: an export is a Qwen3 that an independent engine runs to the same tokens.

Claim   transformers loads an export without a warning, and gives the logits to 1e-4 and the same
        64 greedy tokens for 8 prompts; exporting twice gives the same files; a Hugging Face
        directory (two shards, bf16, tied, heads wider than the model) comes back the same tensors.
Why     A model that only its own program can read was perhaps never the architecture it claims.
Reads   gates/golden/*.npz, made once with torch and transformers.
Needs   A CPU or one CUDA device; torch and transformers for three values. About 15 seconds.
"""

import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
from safetensors.numpy import load_file, save_file

from gates.instruments.golden.compare import (
    can_ask,
    closed_loop,
    export_values,
    golden_greedy,
    imported,
)
from gates.instruments.golden.reference import MODELS
from gates.judging.gate import Defect, Gate, NotMeasured
from xtrain.engine import ops
from xtrain.engine.dtype import bfloat16
from xtrain.engine.testing import worst
from xtrain.models import hf, hf_import
from xtrain.models.hf import config_dict, export

# Heads that are together twice as wide as the model, as in Qwen3-0.6B, and a tied head.
FOREIGN = replace(
    MODELS[0].config, num_attention_heads=4, head_dim=16, tie_word_embeddings=True, rope_theta=1e6
)


def in_transformers(device: str) -> dict[str, float | NotMeasured]:
    """What transformers makes of exports: the sum or the worst of a grouped and a tied model."""
    names = ("export_load_warnings", "export_greedy_differing_tokens", "export_logits_max_abs")
    if not can_ask():
        reason = NotMeasured("torch and transformers are not installed (xtrain[peers])")
        return dict.fromkeys(names, reason)
    found = [closed_loop(device, golden.config) for golden in MODELS]
    values = (
        sum(each["closed_loop_complaints"] for each in found),
        sum(each["closed_loop_greedy_mismatches"] for each in found),
        worst(each["closed_loop_logits_max_abs"] for each in found),
    )
    return dict(zip(names, values, strict=True))


def stored_tokens(device: str) -> dict[str, float]:
    """Greedy tokens of exported and imported models against those stored from transformers."""
    return {
        "golden_greedy_differing_tokens": golden_greedy(device)["golden_greedy_mismatches"],
    }


def twice(device: str) -> dict[str, float]:
    """Files that differ between two exports of one model."""
    found = [export_values(device, golden.config) for golden in MODELS]
    return {"export_differing_sha256": sum(each["export_files_differing"] for each in found)}


def in_and_out(device: str) -> dict[str, float]:
    """Tensors of a Hugging Face directory that are others after import and export, or missing."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = write_foreign(Path(folder, "theirs"))
        model, buffers = imported(Path(folder, "theirs"), device)
        ours = Path(folder, "ours")
        export(model, buffers, ours, tokenizer_writer=lambda place: None, eos_token_id=0)
        written = load_file(ours / hf.WEIGHTS)
    differing = [
        name
        for name in theirs.keys() | written.keys()
        if name not in theirs
        or name not in written
        or theirs[name].astype(np.float32).tobytes() != written[name].tobytes()
    ]
    return {"import_export_differing_tensors": float(len(differing))}


def write_foreign(directory: Path) -> dict[str, np.ndarray]:
    """Write a directory as others publish them: bf16 in two shards with an index; the tensors."""
    directory.mkdir()
    content = config_dict(FOREIGN, eos_token_id=0) | {"torch_dtype": "bfloat16"}
    del content["dtype"], content["rope_parameters"]  # the older spelling alone
    (directory / hf.CONFIG).write_text(json.dumps(content))
    source = np.random.default_rng(9)
    tensors = {
        name: source.standard_normal(shape).astype(bfloat16)
        for name, shape in foreign_shapes().items()
    }
    where = {}
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, directory / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": where}
    (directory / hf_import.INDEX).write_text(json.dumps(index))
    return tensors


def foreign_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers has them, written out here on their own."""
    c = FOREIGN
    D, F, q = c.hidden_size, c.intermediate_size, c.num_attention_heads * c.head_dim
    kv = c.num_key_value_heads * c.head_dim
    layer = {
        "self_attn.q_proj": (q, D),
        "self_attn.k_proj": (kv, D),
        "self_attn.v_proj": (kv, D),
        "self_attn.o_proj": (D, q),
        "self_attn.q_norm": (c.head_dim,),
        "self_attn.k_norm": (c.head_dim,),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
        "input_layernorm": (D,),
        "post_attention_layernorm": (D,),
    }
    shapes = {"model.embed_tokens.weight": (c.vocab_size, D), "model.norm.weight": (D,)}
    for i in range(c.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _config_says(**changes):
    """An export whose config.json states something else than the model."""
    sound = hf.config_dict

    def wrong(config, *, eos_token_id):
        return sound(config, eos_token_id=eos_token_id) | changes

    return mock.patch.object(hf, "config_dict", wrong)


def _another_base_is_stated():
    rope = {"rope_type": "default", "rope_theta": 500.0}
    return _config_says(rope_theta=500.0, rope_parameters=rope)


def _weights_hold(extra: dict[str, np.ndarray]):
    """A weights file with tensors that no Qwen3 has."""
    sound = hf.write_tensors

    def wrong(path, tensors, *rest, **options):
        sound(path, tensors | extra, *rest, **options)

    return mock.patch.object(hf, "write_tensors", wrong)


def _an_unknown_tensor_is_written():
    return _weights_hold({"model.layers.0.self_attn.rotary_emb.phase": np.ones(3, np.float32)})


def _gate_and_up_change_places():
    """On their way into the export; the model itself is sound."""
    sound = hf.named_tensors

    def wrong(buffers, buffer):
        names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        found = sound(buffers, buffer)
        return {_renamed(name, names): found[name] for name in found}

    return mock.patch.object(hf, "named_tensors", wrong)


def _keys_and_values_change_places():
    """On their way in from a directory."""
    sound = hf_import.named_tensors

    def wrong(buffers, buffer):
        names = {"k_proj": "v_proj", "v_proj": "k_proj"}
        found = sound(buffers, buffer)
        return {_renamed(name, names): found[name] for name in found}

    return mock.patch.object(hf_import, "named_tensors", wrong)


def _renamed(name: str, names: dict[str, str]) -> str:
    return ".".join(names.get(part, part) for part in name.split("."))


def _queries_are_not_normed():
    sound = ops.qk_norm_rope

    def wrong(qkv, q_weight, k_weight, positions, **attrs):
        q, _, _ = sound(qkv, None, None, positions, **attrs)
        _, k, v = sound(qkv, q_weight, k_weight, positions, **attrs)
        return q, k, v

    return mock.patch.object(ops, "qk_norm_rope", wrong)


def _each_export_has_a_number():
    sound, count = hf.config_dict, itertools.count()

    def wrong(config, *, eos_token_id):
        return sound(config, eos_token_id=eos_token_id) | {"exported": next(count)}

    return mock.patch.object(hf, "config_dict", wrong)


GATE = Gate(
    "T9",
    "QK-norm and export",
    measures=(stored_tokens, twice, in_and_out, in_transformers),
    defects=(
        Defect(
            "queries not normed",
            "golden_greedy_differing_tokens",
            stored_tokens,
            _queries_are_not_normed,
        ),
        Defect("numbered", "export_differing_sha256", twice, _each_export_has_a_number),
        Defect(
            "keys for values",
            "import_export_differing_tensors",
            in_and_out,
            _keys_and_values_change_places,
        ),
        Defect(
            "unknown tensor",
            "export_load_warnings",
            in_transformers,
            _an_unknown_tensor_is_written,
        ),
        Defect(
            "gate for up",
            "export_greedy_differing_tokens",
            in_transformers,
            _gate_and_up_change_places,
        ),
        Defect("another base", "export_logits_max_abs", in_transformers, _another_base_is_stated),
    ),
)
