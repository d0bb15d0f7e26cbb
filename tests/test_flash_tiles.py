"""Flash attention's tiling, in NumPy, equals attention: ragged, grouped, in documents, cached."""

import flash_tiles
import numpy as np
import pytest

from xtrain.config.rules import FLASH_HEAD_DIMS
from xtrain.cuda.kernels import flash_attention
from xtrain.cuda.kernels.flash_attention_backward import variant
from xtrain.engine.dtype import bfloat16
from xtrain.engine.ops.attention import attention

REFERENCE = attention.reference
# batches, heads, key-value heads, queries, keys, head dim
SHAPES = [
    (1, 1, 1, 1, 1, 16),
    (2, 4, 2, 193, 193, 32),  # ragged, groups of two
    (1, 3, 1, 128, 128, 64),  # whole tiles, one key-value head
    (1, 2, 2, 300, 300, 128),
    (1, 2, 1, 257, 257, 96),  # the last tile has one query
]


def draw(shape, seed=0, dtype=np.float32):
    B, H, Hk, T, S, Dh = shape
    source = np.random.default_rng(seed)
    q, dy = (source.standard_normal((B, H, T, Dh)).astype(dtype) for _ in range(2))
    k, v = (source.standard_normal((B, Hk, S, Dh)).astype(dtype) for _ in range(2))
    return q, k, v, dy


def documents(B, T, seed=1):
    """Starts that grow from document to document."""
    begins = np.random.default_rng(seed).random((B, T)) < 0.02
    return np.maximum.accumulate(np.where(begins, np.arange(T), 0), axis=1).astype(np.int32)


def anywhere(B, T, seed=2):
    """Starts in no order, some of them after the query: it sees nothing."""
    source = np.random.default_rng(seed)
    starts = source.integers(0, T + 3, (B, T)) * (source.random((B, T)) < 0.5)
    return starts.astype(np.int32)


def truth(q, k, v, starts, offsets, dy=None):
    wide = [x.astype(np.float64) for x in (q, k, v)]
    y, saved = REFERENCE.forward(np, *wide, starts, offsets)
    return y, None if dy is None else REFERENCE.backward(np, dy.astype(np.float64), saved)[:3]


def log_sum_exp(q, k, starts, offsets):
    """lse in float64, (B, H, T): y of values that are one, before it is divided by the sum."""
    _, H, T, Dh = q.shape
    k = np.repeat(k, H // k.shape[1], axis=1).astype(np.float64)
    score = q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(Dh)
    position = np.arange(T)[None, :] + (0 if offsets is None else offsets[:, None])
    key = np.arange(k.shape[2])
    seen = key <= position[..., None]
    if starts is not None:
        seen = seen & (key >= starts[..., None])
    with np.errstate(divide="ignore"):
        return np.log(np.where(seen[:, None], np.exp(score), 0).sum(-1))


def distance(value, true):
    return np.linalg.norm(value - true) / max(np.linalg.norm(true), 1e-300)


def check_forward(q, k, v, starts, offsets, cut=None):
    cut = cut or flash_attention.geometry(q.shape[3])
    found = flash_tiles.Forward(q, k, v, starts, offsets, cut)
    assert distance(found.y, truth(q, k, v, starts, offsets)[0]) < 1e-6
    lse = log_sum_exp(q, k, starts, offsets)
    blind = lse == -np.inf
    np.testing.assert_array_equal(found.lse == -np.inf, blind)
    np.testing.assert_allclose(found.lse[~blind], lse[~blind], atol=3e-6, rtol=1e-6)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("starts", [None, documents, anywhere])
def test_tiles_of_keys_give_attention_and_its_log_sum_exp(shape, starts):
    q, k, v, _ = draw(shape)
    check_forward(q, k, v, starts and starts(shape[0], shape[3]), None)


def test_cached_keys_move_the_mask():
    q, k, v, _ = draw((3, 4, 2, 70, 300, 32))
    check_forward(q, k, v, None, np.array([0, 100, 230], np.int32))


@pytest.mark.parametrize("step", [0.5, -0.5])
def test_a_maximum_that_grows_or_falls_along_the_keys_is_followed(step):
    q, k, v, _ = draw((1, 1, 1, 260, 260, 32))
    q[...] = 1
    k[...] = (step * np.arange(260, dtype=np.float32))[:, None]  # scores up to 735: 2^1060
    check = flash_tiles.Forward(q, k, v, None, None, flash_attention.geometry(32))
    assert distance(check.y, truth(q, k, v, None, None)[0]) < 3e-5  # scores' own rounding


def test_parts_that_no_query_of_a_warp_sees_are_skipped():
    T, cut = 512, flash_attention.geometry(32)
    q, k, v, _ = draw((1, 1, 1, T, T, 32))
    rows = cut.ROW_TILES * 16
    plain = check_forward(q, k, v, None, None)
    assert plain.parts == sum(-(-(at + rows) // cut.PART) for at in range(0, T, rows))
    assert plain.masked == T // rows  # the diagonal's
    starts = (np.arange(T) // 256 * 256).astype(np.int32)[None]  # two documents of 256
    two = check_forward(q, k, v, starts, None)
    half = check_forward(q[:, :, :256], k[:, :, :256], v[:, :, :256], None, None)
    assert (two.parts, two.masked) == (2 * half.parts, 2 * half.masked)


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("starts", [None, documents, anywhere])
def test_gradients_summed_tile_by_tile_equal_attentions(shape, starts, hopper):
    q, k, v, dy = draw(shape)
    starts = starts and starts(shape[0], shape[3])
    forward = flash_tiles.Forward(q, k, v, starts, None, flash_attention.geometry(shape[5]))
    chosen = variant(bfloat16, shape[5], hopper)
    found = flash_tiles.backward(
        q, k, v, forward.y, forward.lse, dy, starts, chosen.rows, chosen.tile
    )
    for value, true in zip(found, truth(q, k, v, starts, None, dy)[1], strict=True):
        assert np.linalg.norm(value - true) <= 2e-6 * np.linalg.norm(true) + 1e-6


def test_a_mask_that_is_off_by_one_at_a_tiles_edge_is_seen(monkeypatch):
    right = flash_tiles.sight_of

    def wrong(*arguments):
        sight = right(*arguments)
        return sight._replace(full_end=sight.full_end + 1)

    monkeypatch.setattr(flash_tiles, "sight_of", wrong)
    q, k, v, _ = draw((1, 1, 1, 193, 193, 32))
    with pytest.raises(AssertionError):
        check_forward(
            q, k, v, None, None, flash_attention.geometry(32)._replace(PART=1, KEY_TILE=1)
        )


def test_the_configuration_takes_the_head_dims_that_have_kernels():
    queries = {n: np.zeros((1, 1, 1, n), np.float32) for n in range(2, 161, 2)}
    served = [n for n, q in queries.items() if flash_attention.serves(q, None)]
    assert served == list(FLASH_HEAD_DIMS)
