"""Launches the kernels of causal attention's gradients: no scores in memory, one order of sums.

Two kernels (flash_attention_backward.cuh says why): `queries` makes dq and the terms of each row
that `keys` then makes dk and dv of. bf16 with wgmma on compute capability 9.0, else with mma.sync;
fp32 without tensor cores. Kept between them: 8 bytes a query and head.
q, y, dy: (B, H, T, Dh).  k, v: (B, Hk, T, Dh).  lse: (B, H, T) fp32, dense: the natural logarithm
of the sum of the scaled scores' exponentials, -inf where a row sees nothing. starts: (B, T) int32,
or None. Any strides, Dh dense, rows at multiples of 16 bytes. No cached keys: T queries, T keys.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from xtrain.cuda import tensor_map
from xtrain.cuda.compile import nvrtc
from xtrain.engine.dtype import bfloat16, float32

LAYOUT = np.dtype([("batch", np.int64), ("head", np.int32), ("token", np.int32)])
ROWS_OF_A_BOX = 64
WGMMA_HEAD_DIMS = (32, 64, 128)
MOST_HEAD_DIM = 128


class Variant(NamedTuple):
    """A source file and its geometry: rows of a block and tile, threads, shared bytes."""

    file: str
    rows: int
    tile: int
    threads: int
    query_bytes: int
    key_bytes: int

    @property
    def hopper(self) -> bool:
        return self.file.endswith("_wgmma.cu")


def variant(dtype, head_dim: int, hopper: bool) -> Variant:
    """The kernels for a dtype and head dim; ValueError if there are none."""
    if head_dim % 16 or not 16 <= head_dim <= MOST_HEAD_DIM:
        raise ValueError(
            f"flash attention: head dim {head_dim}, not a multiple of 16 in 16..{MOST_HEAD_DIM}"
        )
    if dtype == float32:
        pitch, rows = head_dim + 1, 32
        size = 4 * (4 * rows * pitch + 2 * rows * (rows + 1))
        return Variant("flash_attention_backward_plain.cu", rows, rows, 256, size, size)
    if dtype != bfloat16:
        raise ValueError(f"flash attention: dtype {dtype}, not bfloat16 or float32")
    if hopper and head_dim in WGMMA_HEAD_DIMS:
        box = 2 * ROWS_OF_A_BOX * head_dim
        stages = (3 if head_dim <= 32 else 2), (3 if head_dim <= 64 else 2)
        query_bytes = 2 * box * (1 + stages[0]) + 1024
        key_bytes = 2 * box * (1 + stages[1]) + 8 * ROWS_OF_A_BOX * stages[1] + 1024
        file = "flash_attention_backward_wgmma.cu"
        sizes = (size // 1024 * 1024 for size in (query_bytes, key_bytes))
        return Variant(file, ROWS_OF_A_BOX, ROWS_OF_A_BOX, 128, *sizes)
    rows, tile = (128 if head_dim <= 32 else 64), (64 if head_dim <= 64 else 32)
    size = 2 * (head_dim + 8) * (2 * rows + 4 * tile) + 16 * tile
    return Variant("flash_attention_backward.cu", rows, tile, 128, size, size)


def backward(xp, q, k, v, y, lse, dy, starts):
    """dq, dk, dv; each stored as q, k, v are."""
    B, H, T, Dh = q.shape
    Hk = k.shape[1]
    if k.shape[2] != T:
        raise ValueError(f"flash attention: {T} queries, {k.shape[2]} keys")
    chosen = variant(q.dtype, Dh, _is_hopper())
    k, v, y, dy = (with_dense_rows(xp, x) for x in (k, v, y, dy))
    q = with_dense_rows(xp, q)
    lse = xp.ascontiguousarray(lse)
    starts = None if starts is None else xp.ascontiguousarray(starts)
    dq, dk, dv = xp.empty_like(q), xp.empty_like(k), xp.empty_like(v)
    padded = -(-T // ROWS_OF_A_BOX) * ROWS_OF_A_BOX
    offsets, deltas = xp.empty((2, B, H, padded), "float32")
    if chosen.hopper:
        columns = min(Dh, ROWS_OF_A_BOX)
        inputs = [tensor_map.boxes(x, ROWS_OF_A_BOX, columns) for x in (q, k, v, dy)]
        to_queries, to_keys = [*inputs, y, dy, layout(y), layout(dy)], inputs
    else:
        to_queries = [q, k, v, y, dy, *(layout(x) for x in (q, k, v, y, dy))]
        to_keys = [q, k, v, dy, *(layout(x) for x in (q, k, v, dy))]
    sizes = [np.int32(n) for n in (H, Hk, T, padded)] + [np.float32(1 / math.sqrt(Dh))]
    blocks = -(-T // chosen.rows)
    _kernel(chosen, "queries", Dh, chosen.query_bytes)(
        (blocks, H, B),
        (chosen.threads,),
        (*to_queries, lse, starts, dq, layout(dq), offsets, deltas, *sizes),
        shared_mem=chosen.query_bytes,
    )
    key_bytes = chosen.key_bytes + (0 if starts is None else 8 * -(-T // chosen.tile))
    _kernel(chosen, "keys", Dh, key_bytes)(
        (blocks, Hk, B),
        (chosen.threads,),
        (*to_keys, offsets, deltas, starts, dk, dv, layout(dk), layout(dv), *sizes),
        shared_mem=key_bytes,
    )
    return dq, dk, dv


@functools.cache
def _kernel(chosen: Variant, entry: str, head_dim: int, shared_bytes: int):
    defines = (f"HEAD_DIM={head_dim}",)
    if chosen.hopper:
        function = nvrtc.function_of("sm_90a", chosen.file, entry, defines)
    else:
        function = nvrtc.function(chosen.file, entry, defines)
    if shared_bytes > function.max_dynamic_shared_size_bytes:
        function.max_dynamic_shared_size_bytes = shared_bytes
    return function


@functools.cache
def _is_hopper() -> bool:
    import cupy

    return cupy.cuda.Device().compute_capability == "90"


def with_dense_rows(xp, x):
    """x, copied unless its rows are dense and all start at multiples of 16 bytes."""
    dense = x.strides[3] == x.itemsize and x.data.ptr % 16 == 0
    return x if dense and not any(s % 16 for s in x.strides[:3]) else x.copy()


def layout(x) -> np.ndarray:
    """Strides in elements, as the kernels' struct Layout."""
    batch, head, token = (stride // x.itemsize for stride in x.strides[:3])
    if max(x.shape[1] * head, x.shape[2] * token) >= 2**31:
        raise ValueError(f"flash attention: {x.shape} with strides {x.strides} is too large")
    return np.frombuffer(np.array([(batch, head, token)], LAYOUT).tobytes(), "V16")
