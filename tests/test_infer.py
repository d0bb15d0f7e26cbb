"""Decoding with the key-value cache, ragged batches and sampling."""

import gc
import tracemalloc

import numpy as np
import pytest

from xtrain.engine import device, ops, rng
from xtrain.engine.params import FlatBuffers
from xtrain.engine.tensor import Tensor, is_recording, no_tape
from xtrain.errors import UsageError
from xtrain.infer.cache import KVCache
from xtrain.infer.generate import generate, prefill, stream
from xtrain.infer.sample import Sampling, gumbel, sample
from xtrain.models.config import Qwen3Config
from xtrain.models.qwen3 import Qwen3

CONFIG = Qwen3Config(
    vocab_size=53,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.3,
)
PROMPTS = [[7], [1, 2, 3, 4, 5], [9, 8], [11] * 12, [50, 0, 52]]
STREAMS = np.arange(4, dtype=np.uint32)


@pytest.fixture(scope="module")
def model():
    here = device.use("cpu")
    model = Qwen3(CONFIG)
    FlatBuffers(model.named_parameters(), here).initialize(3, here)
    return model


def full_logits(model, tokens):
    """Logits (V,) behind the last token, without a cache."""
    with no_tape():
        return model.logits(model(np.array([tokens], np.int32))).data[0, -1]


def cached_logits(model, prompts, **options):
    cache = KVCache(model.config, len(prompts), max(map(len, prompts)))
    return prefill(model, prompts, cache, **options)


def test_cached_greedy_equals_full_recomputation(model):
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(30):
            tokens.append(int(full_logits(model, tokens).argmax()))
        assert generate(model, [prompt], max_new_tokens=30) == [tokens[len(prompt) :]]


def test_cached_logits_equal_full_recomputation_at_every_position(model):
    tokens = PROMPTS[3] + PROMPTS[1] + PROMPTS[2]
    cache = KVCache(model.config, 1, len(tokens))
    with no_tape():
        for t in range(len(tokens)):
            hidden = model(np.array([tokens[t : t + 1]], np.int32), cache=cache)
            step = model.logits(hidden).data[0, 0]
            np.testing.assert_allclose(step, full_logits(model, tokens[: t + 1]), atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 12, 100])
def test_chunked_prefill_equals_full_prefill(model, chunk_tokens):
    chunked = cached_logits(model, PROMPTS, chunk_tokens=chunk_tokens)
    full = cached_logits(model, PROMPTS)
    assert np.linalg.norm(chunked - full) <= 1e-6 * np.linalg.norm(full)


def test_prefill_of_a_ragged_batch_equals_each_prompt_alone(model):
    together = cached_logits(model, PROMPTS)
    for row, prompt in zip(together, PROMPTS, strict=True):
        alone = cached_logits(model, [prompt])[0]
        assert np.linalg.norm(row - alone) <= 1e-6 * np.linalg.norm(alone)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.3, "seed": 4}])
def test_rows_of_a_batch_equal_the_rows_alone(model, options):
    together = generate(model, PROMPTS, max_new_tokens=40, **options)
    for b, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], max_new_tokens=40, streams=[b], **options)
        assert alone == [together[b]]


def test_a_stream_gives_the_tokens_of_generate(model):
    options = {"max_new_tokens": 20, "temperature": 0.9, "top_k": 8, "top_p": 0.9, "seed": 2}
    assert list(stream(model, PROMPTS[1], **options)) == generate(model, PROMPTS[1:2], **options)[0]


def test_a_stream_leaves_the_tape_of_its_caller_on(model):
    tokens = stream(model, [1, 2], max_new_tokens=3)
    next(tokens)
    assert is_recording()


def test_a_row_ends_after_the_stop_id_and_the_others_go_on(model):
    free = generate(model, PROMPTS, max_new_tokens=25)
    stop = free[1][6]
    stopped = generate(model, PROMPTS, max_new_tokens=25, stop_id=stop)
    for row, whole in zip(stopped, free, strict=True):
        assert row == (whole[: whole.index(stop) + 1] if stop in whole else whole)
    assert list(stream(model, PROMPTS[1], max_new_tokens=25, stop_id=stop)) == stopped[1]


def test_a_row_ends_where_the_positions_end(model):
    prompts = [[1] * 60, [2] * 64, [3]]
    assert [len(r) for r in generate(model, prompts, max_new_tokens=10)] == [5, 1, 10]


def test_no_new_tokens_are_no_work(model):
    assert generate(model, PROMPTS[:2], max_new_tokens=0) == [[], []]
    assert generate(model, [], max_new_tokens=5) == []


def test_memory_is_constant_while_decoding(model):
    tokens = stream(model, [1, 2], max_new_tokens=60)

    def held_after(new_tokens: int) -> int:
        for _ in range(new_tokens):
            next(tokens)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early = held_after(10)
        late = held_after(40)
    finally:
        tracemalloc.stop()
    # Keeping each token's keys and values anew would be 10 KB: 40 x 2 layers x 2 x 2 x 8 x 4.
    assert late - early <= 4_096


def test_attention_over_the_cache_equals_the_last_row_of_full_attention():
    source = np.random.default_rng(0)
    q, k, v = (source.standard_normal((2, h, 9, 8)).astype(np.float32) for h in (4, 2, 2))
    full = ops.attention.run(q, k, v, None, None)[:, :, -1:]
    last = ops.attention.run(q[:, :, -1:], k, v, None, np.full(2, 8, np.int32))
    assert np.linalg.norm(last - full) <= 1e-6 * np.linalg.norm(full)


def test_rope_at_an_absolute_position_is_the_same_alone_and_in_a_sequence():
    source = np.random.default_rng(0)
    qkv = source.standard_normal((1, 30, 64)).astype(np.float32)
    gain = source.standard_normal(8).astype(np.float32)
    shape = {"heads": 4, "kv_heads": 2, "eps": 1e-6, "theta": 1e4}
    positions = np.arange(30, dtype=np.int32)[None]
    whole = ops.qk_norm_rope.run(qkv, gain, gain, positions, **shape)
    alone = ops.qk_norm_rope.run(qkv[:, 29:], gain, gain, positions[:, 29:], **shape)
    for a, b in zip(whole, alone, strict=True):
        np.testing.assert_array_equal(a[:, :, 29:], b)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1] * 65], "prompt 0 has 65 tokens, the model has 64 positions"),
        ([[53]], "prompt 0 has ids from 53 to 53, the vocabulary has 53 words"),
        ([[-1, 3]], "prompt 0 has ids from -1 to 3"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused(model, prompts, said):
    with pytest.raises(UsageError, match=said):
        generate(model, prompts, max_new_tokens=4)
    with pytest.raises(UsageError, match=said.replace("prompt 1", "prompt 0")):
        stream(model, prompts[-1], max_new_tokens=4)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"seed": -1},
        {"max_new_tokens": -1},
    ],
)
def test_an_option_out_of_range_is_refused_by_name(model, options):
    with pytest.raises(UsageError, match=f"{next(iter(options))}="):
        generate(model, [[1]], **{"max_new_tokens": 4, **options})


def test_words_are_drawn_as_often_as_their_probability_says():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])) * 0.7
    rows = np.broadcast_to(logits, (20_000, 4))
    streams = np.arange(20_000, dtype=np.uint32)
    ids = sample(rows, Sampling(temperature=0.7), step=3, streams=streams)
    share = np.bincount(ids, minlength=4) / 20_000
    sigma = np.sqrt(np.array([0.5, 0.3, 0.15, 0.05]) * 0.5 / 20_000)
    assert (np.abs(share - [0.5, 0.3, 0.15, 0.05]) <= 5 * sigma).all()


def test_gumbel_noise_is_finite_and_follows_the_word_not_the_vocabulary():
    key = rng.key_array(np, 5, 9)
    wide = gumbel(np, 1003, key, STREAMS)
    assert np.isfinite(wide).all()
    np.testing.assert_array_equal(wide[:, :101], gumbel(np, 101, key, STREAMS))


def test_seed_step_and_stream_each_change_the_draw():
    logits = np.zeros((4, 1000), np.float32)
    ids = sample(logits, Sampling(1.0, seed=1), step=0, streams=STREAMS)
    assert len(set(ids.tolist())) > 1
    assert (ids == sample(logits, Sampling(1.0, seed=1), step=0, streams=STREAMS)).all()
    assert (ids != sample(logits, Sampling(1.0, seed=1), step=1, streams=STREAMS)).any()
    assert (ids != sample(logits, Sampling(1.0, seed=2**40), step=0, streams=STREAMS)).any()


def drawn(logits, sampling):
    """Ids that turn up in many draws from one row of logits."""
    rows = np.broadcast_to(np.float32(logits), (2000, len(logits)))
    streams = np.arange(2000, dtype=np.uint32)
    return set(sample(rows, sampling, step=0, streams=streams).tolist())


def test_top_k_keeps_the_k_best_words():
    assert drawn([0.1, 0.3, 0.2, 0.0], Sampling(1.0, top_k=2)) == {1, 2}
    assert drawn([0.1, 0.3, 0.2, 0.0], Sampling(1.0, top_k=9)) == {0, 1, 2, 3}


def test_top_p_keeps_the_best_words_that_reach_p():
    logits = np.log([0.1, 0.4, 0.3, 0.2])
    assert drawn(logits, Sampling(1.0, top_p=0.65)) == {1, 2}
    assert drawn(logits, Sampling(1.0, top_p=0.75)) == {1, 2, 3}
    assert drawn(logits, Sampling(1.0, top_p=1e-9)) == {1}


def test_temperature_zero_takes_the_best_word():
    logits = np.array([[0.0, 2.0, 1.0]], np.float32)
    assert sample(logits, Sampling(), step=0, streams=STREAMS[:1]).tolist() == [1]


def test_padding_words_are_never_sampled(model):
    weight = model.head_weight.data
    assert weight.shape[0] == 64
    weight[53], weight[54] = 1e3, -1e3  # one of the two would always win
    try:
        for options in ({}, {"temperature": 50.0}):
            rows = generate(model, PROMPTS, max_new_tokens=40, **options)
            assert max(map(max, rows)) < 53
    finally:
        weight[53:] = 0


def test_a_full_cache_refuses_more():
    cache = KVCache(CONFIG, 1, 2)
    cache.longest = 2
    k = Tensor(np.zeros((1, 2, 1, 8), np.float32))
    with pytest.raises(ValueError, match="cache of 2 tokens is full"):
        cache.append(0, k, k)
