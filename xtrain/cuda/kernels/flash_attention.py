"""Flash attention, the variant `flash` of `attention`: no T x S scores in memory, either way.

Forward goes through the keys of a tile of queries once (flash_attention_forward.cu) and leaves y,
stored token by token as the projection that follows reads it, and lse, (B, H, T) fp32: the natural
logarithm of the sum of the exponentials of a query's scaled scores, -inf where it sees no key.
Saved for backward: q, k, v, y, lse; 4 bytes a query and head beside what is there anyway.

bf16 runs on the tensor cores, fp32 without them (flash_attention_forward_plain.cu).
Composed attention serves the rest: head dims that are no multiple of 16 or over 128, gradients
through cached keys, and fewer than LEAST_CACHED queries over cached keys, as in decoding, where a
tile would be mostly empty.
Sources: Dao, arXiv:2307.08691; Milakov and Gimelshein, arXiv:1805.02867.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from xtrain.cuda.compile import nvrtc
from xtrain.cuda.kernels import attention as composed
from xtrain.cuda.kernels.flash_attention_backward import MOST_HEAD_DIM, layout, with_dense_rows
from xtrain.cuda.kernels.flash_attention_backward import backward as gradients
from xtrain.engine.dtype import bfloat16, float32
from xtrain.engine.ops.attention import attention

LEAST_CACHED = 16


class Geometry(NamedTuple):
    """How a block of the forward kernel cuts its work; the fields are the source's macros."""

    WARPS: int
    ROW_TILES: int  # of 16 queries, a warp
    PART: int  # keys whose scores a warp holds
    KEY_TILE: int  # keys in shared memory, twice
    BLOCKS_PER_SM: int

    @property
    def query_tile(self) -> int:
        return self.WARPS * self.ROW_TILES * 16

    @property
    def threads(self) -> int:
        return 32 * self.WARPS

    def shared_bytes(self, head_dim: int) -> int:
        """The queries' tile, and two each of keys and values; rows are padded by 16 bytes."""
        return (self.query_tile + 4 * self.KEY_TILE) * (head_dim + 8) * 2


@functools.cache
def geometry(head_dim: int) -> Geometry:
    """The fastest of those tried on an H200, 2026-12, that spills no registers."""
    part = 64 if head_dim <= 64 else 48
    return Geometry(4, 2, part, part, 3 if head_dim <= 32 else 2)


PLAIN = {"WARPS": 4, "ROWS": 4}  # of the fp32 kernel: warps of a block, queries of a warp


def serves(q, offsets) -> bool:
    """Whether the kernels take these inputs."""
    head_dim = q.shape[3]
    return (
        head_dim % 16 == 0
        and head_dim <= MOST_HEAD_DIM
        and q.dtype in (bfloat16, float32)
        and (offsets is None or q.shape[2] >= LEAST_CACHED)
    )


def forward(xp, q, k, v, starts, offsets):
    """See `xtrain.engine.ops.attention`."""
    if not serves(q, offsets):
        y, saved = composed.forward(xp, q, k, v, starts, offsets)
        return y, (None, saved)
    y, lse = attend(xp, q, k, v, starts, offsets)
    return y, ((q, k, v, y, lse, starts), offsets)


def backward(xp, dy, saved):
    """See `xtrain.engine.ops.attention`."""
    kept, rest = saved
    if kept is None:
        return composed.backward(xp, dy, rest)
    q, k, v, y, lse, starts = kept
    if rest is not None or q.shape[2] != k.shape[2]:
        again = composed.forward(xp, q, k, v, starts, rest)[1]
        return composed.backward(xp, dy, again)
    return *gradients(xp, q, k, v, y, lse, dy, starts), None, None


def attend(xp, q, k, v, starts, offsets):
    """y, stored as (B, T, H, Dh), and lse."""
    B, H, T, Dh = q.shape
    Hk, S = k.shape[1:3]
    q, k, v = (with_dense_rows(xp, x) for x in (q, k, v))
    starts, offsets = (None if x is None else xp.ascontiguousarray(x) for x in (starts, offsets))
    y = xp.empty((B, T, H, Dh), q.dtype).transpose(0, 2, 1, 3)
    lse = xp.empty((B, H, T), float32)
    layouts = [layout(x) for x in (q, k, v, y)]
    sizes = (np.int32(T), np.int32(S), np.int32(H // Hk), np.float32(1 / math.sqrt(Dh)))
    arguments = (q, k, v, y, lse, starts, offsets, *layouts, *sizes)
    kernel, rows, threads, shared_bytes = _kernel(q.dtype == float32, Dh)
    kernel((-(-T // rows), H, B), (threads,), arguments, shared_mem=shared_bytes)
    return y, lse


@functools.cache
def _kernel(plain: bool, head_dim: int):
    """The kernel for a head dim, queries and threads of its blocks, and their shared memory."""
    if plain:
        rows, threads, shared_bytes = math.prod(PLAIN.values()), 32 * PLAIN["WARPS"], 0
        name, macros = "flash_attention_forward_plain", PLAIN | {"STORAGE": "float"}
    else:
        chosen = geometry(head_dim)
        rows, threads = chosen.query_tile, chosen.threads
        shared_bytes = chosen.shared_bytes(head_dim)
        name, macros = "flash_attention_forward", chosen._asdict()
    kernel = nvrtc.function(f"{name}.cu", name, defines(macros, head_dim))
    if shared_bytes:
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    return kernel, rows, threads, shared_bytes


def defines(macros: dict, head_dim: int) -> tuple[str, ...]:
    """The macros of a source as the compiler's definitions."""
    return (f"HEAD_DIM={head_dim}", *(f"{name}={value}" for name, value in macros.items()))


attention.fuse("cuda", forward, backward, variant="flash", simulated=False)
