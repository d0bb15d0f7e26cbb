"""Composed attention: cuBLAS products round softmax kernels, a block of queries at a time.

    scores = scale q k^T,  p = softmax(scores),  y = p v
    dv += p^T dy,  dp = dy v^T,  ds = p (dp - sum(dp p)),  dq = scale ds k,  dk += scale ds^T q

The queries of a key-value head's group are laid out as rows (query, head of the group), so that one
strided-batched product over (sequence, key-value head) serves the group, sums the group's gradients
by itself, and a block of queries is a slice. A block sees only keys up to its last query: with
n blocks (n + 1) / (2 n) of the T x T products and bytes are left, 0.625 with QUERY_BLOCKS = 4.

Scores and dp are fp32, p and ds have the operands' dtype. Saved: q, k, v, and p where one block is
all, which is no longer than LEAST_QUERIES. Keeping every p would save a tenth of the time but hold
H T T elements: 48 GB at 40 heads, 1024 tokens, 32 sequences, 18 layers and bf16. Backward makes
each block's p again with the same kernels, so with the same bits.
Bytes in bf16 at T >> Dh, for each element of a block's scores: 4 + 4 + 2 + 2 forward and
4 + 4 + 2 + 2 + 4 + 2 + 4 + 2 + 2 + 2 backward; they bound the speed.
"""

import functools
import itertools
import math

import numpy as np

from xtrain.cuda.gemm import as_operand, gemm_batched
from xtrain.cuda.kernels.softmax import causal_softmax, causal_softmax_backward
from xtrain.engine.chunks import LEAST_QUERIES, QUERY_BLOCKS
from xtrain.engine.dtype import float32
from xtrain.engine.ops.attention import attention

QUERY_MULTIPLE = 64


def forward(xp, q, k, v, starts, offsets):
    """See `xtrain.engine.ops.attention`."""
    problem = _Problem(q, k, starts, offsets)
    keys, values = _by_head(xp, k), _by_head(xp, v)
    rows = _query_major(xp, q, problem.kv_heads)
    B, H, T, Dh = q.shape
    direct = B == 1 and problem.group == 1  # one stride from head to head in either order
    y = xp.empty((T, H, Dh), q.dtype).transpose(1, 0, 2) if direct else xp.empty_like(rows)
    blocks, kept = problem.blocks(), None
    for block in reversed(blocks):  # the widest first: a pool cuts the others from it
        p = _probabilities(xp, problem, block, rows, keys)
        gemm_batched(p, _cut(values, block.seen), _cut(y, block.rows))
        kept = p if len(blocks) == 1 else None
        del p
    y = y.reshape(q.shape) if direct else _token_major(xp, y, q.shape, problem.kv_heads)
    return y, (problem, q, k, v, kept)


def backward(xp, dy, saved):
    """See `xtrain.engine.ops.attention`."""
    problem, q, k, v, kept = saved
    starts, offsets = problem.starts, problem.offsets
    keys, values = _by_head(xp, k), _by_head(xp, v)
    rows, drows = (_query_major(xp, array, problem.kv_heads) for array in (q, dy))
    dq = xp.empty(rows.shape, rows.dtype)
    blocks = problem.blocks()
    # Sums over several blocks are kept in fp32; the last block sees all keys and goes first.
    sum_dtype = k.dtype if len(blocks) == 1 else float32
    dk, dv = xp.empty(keys.shape, sum_dtype), xp.empty(values.shape, sum_dtype)
    for block in reversed(blocks):
        beta = 0.0 if block is blocks[-1] else 1.0
        seen_dk, seen_dv = _cut(dk, block.seen), _cut(dv, block.seen)
        dy_of_block = _cut(drows, block.rows)
        p = _probabilities(xp, problem, block, rows, keys) if kept is None else kept
        gemm_batched(p, dy_of_block, seen_dv, transpose_a=True, beta=beta)
        dp = xp.empty(p.shape, float32)
        gemm_batched(dy_of_block, _cut(values, block.seen), dp, transpose_b=True)
        # In place of what is not needed again; a kept p must stay as it was.
        ds = p if kept is None else dp if p.dtype == float32 else xp.empty(p.shape, p.dtype)
        causal_softmax_backward(xp, p, dp, ds, starts, offsets, **problem.mask_of(block))
        scaled = {"alpha": problem.scale}
        gemm_batched(ds, _cut(keys, block.seen), _cut(dq, block.rows), **scaled)
        gemm_batched(ds, _cut(rows, block.rows), seen_dk, transpose_a=True, beta=beta, **scaled)
        del p, dp, ds
    if sum_dtype != k.dtype:
        dk, dv = dk.astype(k.dtype), dv.astype(k.dtype)
    dq = _head_major(xp, dq, q.shape, problem.kv_heads)
    return dq, dk.reshape(k.shape), dv.reshape(k.shape), None, None


class _Block:
    """Queries first .. last - 1: their rows, and the keys that the last of them can see."""

    def __init__(self, first: int, last: int, group: int, visible: int):
        self.first = first
        self.rows = slice(first * group, last * group)
        self.row_count = (last - first) * group
        self.seen = slice(0, visible)


class _Problem:
    """Sizes of one attention: T queries of `group` heads a key-value head, S keys."""

    def __init__(self, q, k, starts, offsets):
        self.queries, self.keys = q.shape[2], k.shape[2]
        self.kv_heads = k.shape[1]
        self.group = q.shape[1] // self.kv_heads
        self.scale = 1 / math.sqrt(q.shape[3])
        self.starts, self.offsets = starts, offsets

    def blocks(self) -> tuple[_Block, ...]:
        """Blocks of queries, the last of which sees every key."""
        if self.offsets is not None:  # only the device knows how many keys a row sees
            return (_Block(0, self.queries, self.group, self.keys),)
        return _blocks(self.queries, self.keys, self.group, LEAST_QUERIES)

    def mask_of(self, block: _Block) -> dict[str, int]:
        """What the softmax kernels need to know of a block's rows."""
        return {
            "group": self.group,
            "first": block.first,
            "queries": self.queries,
            "kv_heads": self.kv_heads,
        }


@functools.lru_cache(maxsize=1024)  # every layer of an eager step asks the same
def _blocks(queries: int, keys: int, group: int, least: int) -> tuple[_Block, ...]:
    size = max(least, -(-queries // QUERY_BLOCKS))
    size = -(-size // QUERY_MULTIPLE) * QUERY_MULTIPLE
    edges = [*range(0, queries, size), queries]
    found = [
        _Block(first, last, group, min(last, keys)) for first, last in itertools.pairwise(edges)
    ]
    found[-1].seen = slice(0, keys)
    return tuple(found)


def _probabilities(xp, problem: _Problem, block: _Block, rows, keys):
    """p of a block of queries: (B * Hk, rows of the block, visible keys)."""
    scores = xp.empty((rows.shape[0], block.row_count, block.seen.stop), float32)
    gemm_batched(
        _cut(rows, block.rows),
        _cut(keys, block.seen),
        scores,
        transpose_b=True,
        alpha=problem.scale,
    )
    p = scores if rows.dtype == float32 else xp.empty(scores.shape, rows.dtype)
    causal_softmax(xp, scores, p, problem.starts, problem.offsets, **problem.mask_of(block))
    return p


def _cut(array, part: slice):
    """array[:, part], without making a view of all of it."""
    return array if part == slice(0, array.shape[1]) else array[:, part]


def _by_head(xp, x):
    """(B, Hk, S, Dh) -> (B * Hk, S, Dh); a view, also of the used part of a cache."""
    return as_operand(xp, x.reshape(-1, *x.shape[2:]))


def _query_major(xp, x, kv_heads):
    """(B, H, T, Dh) -> (B * Hk, T * G, Dh): row t * G + g is query t of the group's head g."""
    B, H, T, Dh = x.shape
    if kv_heads == H and (B == 1 or x.flags.c_contiguous):
        return x.reshape(B * H, T, Dh)
    grouped = (B, kv_heads, H // kv_heads, T)
    return _moved(xp, x, grouped, (0, 1, 3, 2, 4)).reshape(B * kv_heads, -1, Dh)


def _head_major(xp, rows, shape, kv_heads):
    """The inverse of `_query_major`: contiguous, in the given shape (B, H, T, Dh)."""
    B, H, T, _ = shape
    if kv_heads == H:
        return rows.reshape(shape)
    return _moved(xp, rows, (B, kv_heads, T, H // kv_heads), (0, 1, 3, 2, 4)).reshape(shape)


def _token_major(xp, rows, shape, kv_heads):
    """As `_head_major`, but stored as (B, T, H, Dh), which the projection that follows reads."""
    B, H, T, Dh = shape
    stored = _moved(xp, rows, (B, kv_heads, T, H // kv_heads), (0, 2, 1, 3, 4))
    return stored.reshape(B, T, H, Dh).transpose(0, 2, 1, 3)


def _moved(xp, x, leading, axes):
    """x with its leading axes cut into `leading` and then permuted; contiguous.

    Moved in words of 8 bytes, 4 bf16 at a time, where rows consist of them.
    """
    words = _as_words(xp, x)
    words = words.reshape(*leading, words.shape[-1]).transpose(axes)
    return xp.ascontiguousarray(words).view(x.dtype)


def _as_words(xp, x):
    """x, its last axis as 8-byte words, in whatever order the other axes are stored."""
    if x.shape[-1] * x.itemsize % 8:
        return x
    stored_order = sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
    stored = x.transpose(stored_order)
    if stored_order[-1] != x.ndim - 1 or not stored.flags.c_contiguous:
        return xp.ascontiguousarray(x).view(np.uint64)
    return stored.view(np.uint64).transpose([stored_order.index(axis) for axis in range(x.ndim)])


attention.fuse("cuda", forward, backward)
