"""Parameters as views of flat buffers, and their initial values."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gates.instruments import tiny_run
from xtrain.engine import device, rng
from xtrain.engine.params import (
    ALIGNMENT,
    FlatBuffers,
    Parameter,
    Part,
    initial_weights,
    part_rows,
)
from xtrain.models.config import Qwen3Config
from xtrain.models.hf import named_tensors
from xtrain.models.qwen3 import Qwen3
from xtrain.nn.layers import Embedding, Linear

CPU = device.use("cpu")


def placed(*named, seed=0):
    buffers = FlatBuffers(named, CPU)
    buffers.initialize(seed, CPU)
    return buffers


def matrix(rows, columns, **options):
    return Parameter((rows, columns), std=0.5, decay=True, **options)


def test_a_parameter_is_a_view_of_the_flat_buffers():
    p = matrix(3, 5)
    buffers = placed(("a", matrix(2, 2)), ("p", p))
    at = buffers.offsets["p"]
    p.data[1, 2] = 7.0
    p.accumulate_grad(np.full((3, 5), 2.0, np.float32))
    assert buffers.master[at + 7] == 7.0
    assert (buffers.grad[at : at + 15] == 2.0).all()


def test_a_gradient_is_added_in_place():
    p = matrix(3, 5)
    placed(("p", p))
    view = p.grad
    p.accumulate_grad(np.ones((3, 5), np.float32))
    p.accumulate_grad(np.ones((3, 5), np.float32))
    assert p.grad is view
    assert (view == 2).all()


def test_parameters_start_at_aligned_places_and_do_not_overlap():
    named = [(f"p{i}", matrix(i + 1, 7)) for i in range(9)]
    buffers = placed(*named)
    ends = 0
    for name, p in buffers.parameters.items():
        assert buffers.offsets[name] % ALIGNMENT == 0
        assert buffers.offsets[name] >= ends
        ends = buffers.offsets[name] + p.size
    assert buffers.size % ALIGNMENT == 0


def test_parameters_that_are_decayed_come_first():
    buffers = placed(
        ("gain", Parameter((4,), std=None, decay=False)),
        ("weight", matrix(4, 4)),
        ("bias", Parameter((4,), std=None, decay=False)),
    )
    assert list(buffers.parameters) == ["weight", "gain", "bias"]
    assert buffers.decayed == buffers.offsets["gain"]


def test_only_matrices_are_decayed():
    model = Qwen3(tiny_run.MODEL)
    for name, p in model.named_parameters():
        assert p.decay == (len(p.declared) == 2), name


def test_initial_weights_depend_on_the_name_and_the_seed_alone():
    alone = placed(("p", matrix(6, 7)))
    beside = placed(("q", matrix(9, 9)), ("p", matrix(6, 7)))
    other = placed(("p", matrix(6, 7)), seed=1)
    np.testing.assert_array_equal(alone.parameters["p"].data, beside.parameters["p"].data)
    assert (alone.parameters["p"].data != other.parameters["p"].data).any()
    assert (beside.parameters["q"].data[:6, :7] != beside.parameters["p"].data).any()


def test_a_fused_parameter_starts_as_its_parts_would_alone():
    fused = placed(
        ("attn.qkv_proj.weight", matrix(6, 4, parts=[Part("q_proj", 4), Part("k_proj", 2)]))
    )
    alone = placed(("attn.q_proj.weight", matrix(4, 4)), ("attn.k_proj.weight", matrix(2, 4)))
    both = np.concatenate([p.data for p in alone.parameters.values()])
    np.testing.assert_array_equal(fused.parameters["attn.qkv_proj.weight"].data, both)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("pairs", [1, 7, 64, 10_000])
def test_neither_threads_nor_slices_change_initial_weights(threads, pairs):
    # 3 x 7 and 8 x 7 elements: one part is odd, one is even; a padding row follows.
    parts = [Part("q_proj", 3), Part("k_proj", 8)]
    p = Parameter((12, 7), std=0.5, decay=True, rows=11, parts=parts)
    key = rng.key_array(np, 5, 0)
    with ThreadPoolExecutor(threads) as pool:
        found = initial_weights("attn.qkv_proj.weight", p, key, pool, pairs=pairs)
    drawn = [
        0.5 * rng.standard_normal(np, rows * 7, key, rng.site_of(f"init/attn.{part}.weight"))
        for part, rows in (("q_proj", 3), ("k_proj", 8))
    ]
    expected = np.concatenate([*drawn, np.zeros(7, np.float32)]).reshape(12, 7)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_an_error_in_a_thread_is_raised():
    with ThreadPoolExecutor(2) as pool, pytest.raises(IndexError):
        initial_weights("p", matrix(3, 5), np.zeros(1, np.uint32), pool)


def test_parts_are_named_after_their_place():
    p = matrix(6, 4, parts=[Part("q_proj", 4), Part("k_proj", 2)])
    assert part_rows("layers.0.self_attn.qkv_proj.weight", p) == [
        ("layers.0.self_attn.q_proj.weight", 0, 4),
        ("layers.0.self_attn.k_proj.weight", 4, 2),
    ]


def test_initial_weights_have_the_declared_spread():
    weights = placed(("p", Parameter((200, 300), std=0.02, decay=True))).parameters["p"].data
    deviation = 0.02 / np.sqrt(2 * weights.size)  # of the standard deviation of normal numbers
    assert abs(weights.std() - 0.02) < 4 * deviation
    assert abs(weights.mean()) < 4 * 0.02 / np.sqrt(weights.size)


def test_gains_start_at_one():
    gains = placed(("gain", Parameter((5,), std=None, decay=False))).parameters["gain"].data
    assert (gains == 1).all()


def test_padding_rows_start_at_zero_and_stay_there():
    tiny = tiny_run.build(CPU)
    ids = np.random.default_rng(0).integers(0, 97, (1, 2, 9)).astype(np.int32)
    for step in range(3):
        tiny.step.load({"input_ids": ids[..., :-1], "targets": ids[..., 1:]}, step, 1e-2)
        tiny.step.run()
    for layer in (tiny.model.embed_tokens, tiny.model.lm_head):
        assert layer.weight.declared[0] == 128
        assert (layer.weight.data[97:] == 0).all()
        assert (layer.weight.data[:97] != 0).any()


def test_the_count_of_parameters_leaves_the_padding_out():
    assert Embedding(97, 4, std=0.02).weight.count == 97 * 4
    assert Embedding(97, 4, std=0.02).weight.size == 128 * 4
    assert Linear(3, {"a": 2, "b": 5}, std=0.02).weight.count == 21


def test_v0_has_the_parameters_of_the_original():
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )
    counts = {name: p.count for name, p in Qwen3(config).named_parameters()}
    ends = counts["embed_tokens.weight"] + counts["lm_head.weight"]
    assert ends == 2 * 50257 * 32
    # 4 layers of 4 x 32^2 (attention) + 3 x 32 x 64 (MLP) + 2 x 32 + 2 x 16 (gains), and one gain
    assert sum(counts.values()) - ends == 4 * (4 * 1024 + 6144 + 64 + 32) + 32


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_the_embedding(tied):
    config = Qwen3Config(**{**vars(tiny_run.MODEL), "tie_word_embeddings": tied})
    model = Qwen3(config)
    assert (model.head_weight is model.embed_tokens.weight) == tied
    names = [name for name, _ in model.named_parameters()]
    assert ("lm_head.weight" in names) != tied


def test_stored_names_are_those_of_hugging_face():
    tiny = tiny_run.build(CPU)
    block = "model.layers.1."
    names = {n for n in named_tensors(tiny.buffers, tiny.buffers.master) if n.startswith(block)}
    assert {n.removeprefix(block) for n in names} == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    }
