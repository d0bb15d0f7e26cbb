"""Hugging Face directories: written, read, refused by name, and understood by transformers."""

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gates.instruments.golden import compare
from gates.instruments.golden.reference import MODELS
from pipelines.export import export_model
from xtrain.assemble.origin import find_origin
from xtrain.engine import device
from xtrain.engine.params import FlatBuffers
from xtrain.errors import UsageError
from xtrain.models.config import Qwen3Config
from xtrain.models.hf import export, named_tensors
from xtrain.models.hf_import import load_hf, read_config, require_weights
from xtrain.models.qwen3 import Qwen3

GROUPED, TIED = (golden.config for golden in MODELS)


def write(directory, config=GROUPED):
    model, buffers = compare.random_model(config, "cpu")
    hashes = export(model, buffers, directory, tokenizer_writer=write_word_list, eos_token_id=3)
    return model, buffers, hashes


def write_word_list(directory):
    (directory / "tokenizer.json").write_text("{}")


def edit_config(directory, **changes):
    path = directory / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "absent"}))


def edit_weights(directory, change):
    path = directory / "model.safetensors"
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path)


def require_same_when_imported(directory, buffers):
    _, read = compare.imported(directory, "cpu")
    theirs = named_tensors(read, read.master)
    for name, view in named_tensors(buffers, buffers.master).items():
        np.testing.assert_array_equal(theirs[name], view)


@pytest.mark.parametrize("config", [GROUPED, TIED])
def test_exporting_twice_and_after_import_gives_the_same_files_and_tensors(config):
    assert compare.export_values("cpu", config) == {
        "export_files_differing": 0,
        "round_trip_tensors_differing": 0,
    }


def test_weights_have_hugging_face_names_without_padding_or_fused_products(tmp_path):
    write(tmp_path / "out")
    shapes = {name: a.shape for name, a in load_file(tmp_path / "out/model.safetensors").items()}
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (211, 32)
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (64, 32)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (32, 32)
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (48, 32)
    assert not [name for name in shapes if "qkv" in name or "gate_up" in name]


def test_a_tied_head_is_not_written(tmp_path):
    write(tmp_path / "out", TIED)
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")


@pytest.mark.parametrize("config", [GROUPED, TIED])
def test_config_reads_back_the_same(tmp_path, config):
    write(tmp_path / "out", config)
    assert read_config(tmp_path / "out") == config


def test_an_export_replaces_an_earlier_one_and_leaves_nothing_beside_it(tmp_path):
    _, _, first = write(tmp_path / "out")
    _, _, second = write(tmp_path / "out", TIED)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(second) == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert first["model.safetensors"] != second["model.safetensors"]


def test_a_failing_export_leaves_the_earlier_one_alone(tmp_path):
    model, buffers, _ = write(tmp_path / "out")
    before = (tmp_path / "out/model.safetensors").read_bytes()

    def fail(directory):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        export(model, buffers, tmp_path / "out", tokenizer_writer=fail, eos_token_id=3)
    assert (tmp_path / "out/model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_of_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="out is not an export"):
        write(tmp_path / "out")
    assert (tmp_path / "out/thesis.txt").read_text() == "mine"


def test_a_model_without_qk_norm_is_not_exported(tmp_path):
    here = device.use("cpu")
    model = Qwen3(GROUPED, qk_norm=False)
    buffers = FlatBuffers(model.named_parameters(), here)
    with pytest.raises(UsageError, match=r"features\.qk_norm=false: .* not a Qwen3"):
        export(model, buffers, tmp_path / "out", tokenizer_writer=print, eos_token_id=3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "qwen3_moe"}, 'model_type="qwen3_moe": only dense qwen3'),
        ({"model_type": "llama"}, 'model_type="llama"'),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "architectures="),
        ({"attention_bias": True}, "attention_bias=true: only False"),
        ({"hidden_act": "gelu"}, "hidden_act=\"gelu\": only 'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*windows"),
        (
            {
                "layer_types": None,
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 1,
            },
            "windows",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=.*linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling=.*yarn"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "rope_parameters=.*llama3",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters="),
        ({"rope_theta": 5e5}, r"rope_parameters\.rope_theta=10000\.0, rope_theta=500000\.0"),
        ({"rope_theta": "absent", "rope_parameters": None}, "one rope_theta was expected: none"),
        ({"head_dim": "absent"}, "head_dim is missing, not a whole number from 2"),
        ({"head_dim": 15}, "head_dim=15: it must be even"),
        ({"hidden_size": 32.5}, "hidden_size is 32.5, not a whole number from 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: it must divide"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, not a number from 1e-18 to 1"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_by_name(tmp_path, changes, said):
    write(tmp_path / "out")
    edit_config(tmp_path / "out", **changes)
    with pytest.raises(UsageError, match=said):
        read_config(tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": "absent", "rope_scaling": "absent"},
        {"rope_theta": "absent", "torch_dtype": "absent"},
        {
            "layer_types": None,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
        {"layer_types": "absent", "sliding_window": 4096, "max_window_layers": 1},
    ],
)
def test_other_spellings_of_the_same_model_are_read(tmp_path, changes):
    write(tmp_path / "out")
    edit_config(tmp_path / "out", **changes)
    assert read_config(tmp_path / "out") == GROUPED


def drop_a_norm(tensors):
    del tensors["model.layers.1.self_attn.q_norm.weight"]


def add_a_bias(tensors):
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)


def widen_a_norm(tensors):
    tensors["model.norm.weight"] = np.ones(33, np.float32)


def widen_to_float64(tensors):
    tensors["model.norm.weight"] = np.ones(32, np.float64)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop_a_norm, r"no tensor model\.layers\.1\.self_attn\.q_norm\.weight"),
        (add_a_bias, r"tensor model\.layers\.0\.self_attn\.q_proj\.bias has no place"),
        (widen_a_norm, r"model\.norm\.weight is \(33,\), config\.json makes it \(32,\)"),
        (widen_to_float64, r"model\.norm\.weight is F64, only F32, F16, BF16 are read"),
    ],
)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_loaded(tmp_path, change, said):
    write(tmp_path / "out")
    edit_weights(tmp_path / "out", change)
    here = device.use("cpu")
    buffers = FlatBuffers(Qwen3(GROUPED).named_parameters(), here)
    with pytest.raises(UsageError, match=said):
        load_hf(tmp_path / "out", buffers, here)
    assert not buffers.master.any()


def test_a_tied_model_may_store_its_head_if_it_is_the_embedding(tmp_path):
    _, buffers, _ = write(tmp_path / "out", TIED)
    edit_weights(
        tmp_path / "out", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]})
    )
    require_same_when_imported(tmp_path / "out", buffers)
    edit_weights(tmp_path / "out", lambda t: t.update({"lm_head.weight": -t["lm_head.weight"]}))
    with pytest.raises(UsageError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        compare.imported(tmp_path / "out", "cpu")


def test_half_precision_weights_are_widened_exactly(tmp_path):
    write(tmp_path / "out")
    halves = {}

    def narrow(tensors):
        for i, name in enumerate(sorted(tensors)):
            dtype = (np.float16, ml_dtypes.bfloat16, np.float32)[i % 3]
            halves[name] = tensors[name] = tensors[name].astype(dtype)

    edit_weights(tmp_path / "out", narrow)
    _, buffers = compare.imported(tmp_path / "out", "cpu")
    for name, view in named_tensors(buffers, buffers.master).items():
        np.testing.assert_array_equal(view, halves[name].astype(np.float32))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: (d / "config.json").unlink(), "out is not a Hugging Face model: no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json is damaged: not JSON"),
        (
            lambda d: (d / "config.json").write_text("[1]"),
            r"config.json is damaged: \[1\], not an object",
        ),
        (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (
            lambda d: (d / "model.safetensors").write_bytes(b"x" * 99),
            "model.safetensors is damaged",
        ),
    ],
)
def test_a_damaged_directory_is_said_to_be(tmp_path, damage, said):
    write(tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(UsageError, match=said):
        compare.imported(tmp_path / "out", "cpu")


def split_in_two(directory):
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    table = {name: file for file, part in parts.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return table


def test_shards_with_an_index_are_read(tmp_path):
    _, buffers, _ = write(tmp_path / "out")
    split_in_two(tmp_path / "out")
    require_same_when_imported(tmp_path / "out", buffers)


def test_a_missing_shard_or_a_wrong_index_is_named(tmp_path):
    write(tmp_path / "out")
    table = split_in_two(tmp_path / "out")
    index = tmp_path / "out/model.safetensors.index.json"
    for change, said in (
        ({"lm_head.weight": "b.safetensors"}, "b.safetensors: no tensor lm_head.weight, which"),
        ({"lm_head.weight": "c.safetensors"}, "shard c.safetensors is not in"),
        ({"lm_head.weight": "../out/a.safetensors"}, "shard ../out/a.safetensors is not in"),
    ):
        index.write_text(json.dumps({"weight_map": {**table, **change}}))
        with pytest.raises(UsageError, match=said):
            compare.imported(tmp_path / "out", "cpu")


@pytest.fixture
def gpt2_sized():
    config = replace(TIED, vocab_size=50257, hidden_size=8, num_hidden_layers=1)
    return compare.random_model(config, "cpu")


def test_the_pipeline_writes_the_five_files_and_reads_them_back(tmp_path, gpt2_sized):
    hashes = export_model(*gpt2_sized, tmp_path / "export")
    assert sorted(hashes) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert export_model(*gpt2_sized, tmp_path / "again") == hashes


def test_the_pipeline_refuses_a_vocabulary_that_is_not_its_tokenizers(tmp_path):
    model, buffers = compare.random_model(TIED, "cpu")
    with pytest.raises(UsageError, match=r"model\.vocab_size=67"):
        export_model(model, buffers, tmp_path / "export")


def test_transformers_loads_an_export_silently_and_says_the_same(tmp_path, gpt2_sized):
    pytest.importorskip("transformers")
    from gates.instruments.golden.make_golden import ask

    export_model(*gpt2_sized, tmp_path / "export")
    answer = ask(tmp_path / "export", [[5, 50256, 9]], new_tokens=2)
    assert (answer["class"], answer["complaints"]) == ("Qwen3ForCausalLM", [])
    ours = gpt2_sized[0].logits(gpt2_sized[0](np.int32([[5, 50256, 9]]))).data[0]
    assert np.abs(ours - answer["logits"][0]).max() <= 1e-4


@pytest.mark.parametrize("config", [GROUPED, TIED])
def test_greedy_of_transformers_is_identical_for_eight_prompts(config):
    pytest.importorskip("transformers")
    values = compare.closed_loop("cpu", config)
    assert values["closed_loop_complaints"] == values["closed_loop_greedy_mismatches"] == 0
    assert values["closed_loop_logits_max_abs"] <= 1e-4


def test_a_tensor_that_is_missing_makes_transformers_complain(tmp_path):
    pytest.importorskip("transformers")
    from gates.instruments.golden.make_golden import ask

    model, buffers = compare.random_model(GROUPED, "cpu")
    writer = compare.small_tokenizer
    export(model, buffers, tmp_path / "out", tokenizer_writer=writer, eos_token_id=3)
    edit_weights(tmp_path / "out", drop_a_norm)
    assert ask(tmp_path / "out", [], new_tokens=1)["complaints"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sharded_directory_of_transformers_is_imported(tmp_path, dtype):
    transformers = pytest.importorskip("transformers")
    import torch

    shape = transformers.Qwen3Config(
        vocab_size=151,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    theirs = transformers.Qwen3ForCausalLM(shape).to(getattr(torch, dtype)).eval()
    theirs.save_pretrained(tmp_path / "hub", max_shard_size="90KB")
    assert len(list((tmp_path / "hub").glob("*.safetensors"))) >= 2
    model, buffers = compare.imported(tmp_path / "hub", "cpu")
    assert model.config == Qwen3Config(
        64,
        96,
        2,
        4,
        2,
        32,
        128,
        151,
        rope_theta=1e6,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    state = {name: p.detach().float().numpy() for name, p in theirs.named_parameters()}
    export(model, buffers, tmp_path / "out", tokenizer_writer=write_word_list, eos_token_id=3)
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == state.keys()
    assert all(written[name].tobytes() == state[name].tobytes() for name in state)
    # Read again, because casting the model to bf16 also rounded its RoPE frequencies.
    wide = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "hub", dtype="float32")
    with torch.no_grad():
        logits = wide(torch.tensor([[3, 1, 4, 1, 5]])).logits[0].numpy()
    ours = model.logits(model(np.int32([[3, 1, 4, 1, 5]]))).data[0]
    assert np.abs(ours - logits).max() <= 1e-4


MISTYPED = {
    "tie_word_embeddings": ["false", 1, None],
    "num_hidden_layers": [10**7, "2", True, 1.0, None, -1, [2]],
    "max_position_embeddings": [10**12, 10**30, 0],
    "vocab_size": [2**40],
    "rope_theta": ["1e6", 1e300, -1],
    "initializer_range": ["0.02", None, 1e300],
    "rms_norm_eps": [1e-300, "1e-6"],
    "layer_types": ["full_attention", [1], 7],
    "use_sliding_window": ["no", 0],
    "sliding_window": ["4096"],
    "max_window_layers": [[], "28"],
    "architectures": ["Qwen3ForCausalLM", 1],
    "model_type": [7, None, ["qwen3"]],
    "rope_parameters": ["default", [], {"rope_type": "default", "rope_theta": "10"}],
    "hidden_act": [["silu"], None],
    "attention_bias": ["false"],
}


@pytest.mark.parametrize("key", MISTYPED)
def test_a_value_of_another_type_or_range_is_refused_by_its_key(tmp_path, key):
    write(tmp_path / "out")
    for value in MISTYPED[key]:
        edit_config(tmp_path / "out", **{key: value})
        with pytest.raises(UsageError, match=rf"config\.json.*{key}") as caught:
            read_config(tmp_path / "out")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "content", ["[" * 10**5, '{"a":' * 10**5, "9" * 10**5, "\ud800", "NaN", ""]
)
def test_odd_json_is_one_line_that_names_the_file(tmp_path, name, content):
    write(tmp_path / "out")
    if name != "config.json":
        split_in_two(tmp_path / "out")
    (tmp_path / "out" / name).write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(UsageError, match=name) as caught:
        compare.imported(tmp_path / "out", "cpu")
    assert "\n" not in str(caught.value)


def test_a_shard_name_longer_than_any_file_is_refused(tmp_path):
    write(tmp_path / "out")
    table = split_in_two(tmp_path / "out")
    index = tmp_path / "out/model.safetensors.index.json"
    for name in ("x" * 5000, "a\u0000b", ""):
        index.write_text(json.dumps({"weight_map": {**table, "lm_head.weight": name}}))
        with pytest.raises(UsageError, match="index.json") as caught:
            compare.imported(tmp_path / "out", "cpu")
        assert len(str(caught.value)) < 1000


def test_a_path_longer_than_any_is_no_directory():
    with pytest.raises(UsageError, match="no such directory"):
        find_origin("x" * 5000)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, value):
    write(tmp_path / "out")
    path = tmp_path / "out/model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][-1, -1] = value
    save_file(tensors, path)
    with pytest.raises(UsageError, match=rf"{name} holds a NaN or infinity"):
        compare.imported(tmp_path / "out", "cpu")


def test_fewer_weights_than_the_config_says_are_refused_before_a_model_is_made(tmp_path):
    write(tmp_path / "out")
    require_weights(tmp_path / "out", read_config(tmp_path / "out"))
    edit_config(tmp_path / "out", num_hidden_layers=4096, layer_types=None)
    with pytest.raises(UsageError, match="config.json makes them"):
        require_weights(tmp_path / "out", read_config(tmp_path / "out"))
