"""Flash attention's kernels in NumPy, tile by tile: what CI can check of them without a GPU.

The tiles, the warps' shares of them, what is skipped and masked, the lazy maximum and the order of
every sum are the sources'; sizes come from the launchers and the source, so they cannot drift.
Arithmetic is fp32 throughout: what is left is the tiling's own error, 1e-6 or so.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from xtrain.cuda.compile import nvrtc
from xtrain.cuda.kernels.flash_attention import Geometry

LAZY = float(re.search(r"float LAZY = ([\d.]+)f;", nvrtc.text("flash_attention_forward.cu"))[1])
LOG2E = np.float32(math.log2(math.e))
LARGEST = (1 << 31) - 1


class Sight(NamedTuple):
    """What some queries see: keys [begin, end); all of them see [full_begin, full_end)."""

    begin: int
    end: int
    full_begin: int
    full_end: int


def sight_of(first: int, rows: int, queries: int, keys: int, offset: int, starts) -> Sight:
    last = min(first + rows, queries) - 1
    begin, full_begin = 0, 0
    if starts is not None:
        here = starts[first : last + 1]
        begin = max(int(here.min(initial=LARGEST)), 0)
        full_begin = int(here.max(initial=0))
    return Sight(begin, min(keys, offset + last + 1), full_begin, min(keys, offset + first + 1))


class Forward:
    """y, lse, and how many parts of scores were made and how many of them masked."""

    def __init__(self, q, k, v, starts, offsets, cut: Geometry):
        B, H, T, Dh = q.shape
        self.y = np.full(q.shape, np.nan, np.float32)
        self.lse = np.full((B, H, T), np.nan, np.float32)
        self.parts, self.masked = 0, 0
        self.cut, self.scale = cut, np.float32(1 / math.sqrt(Dh))
        group = H // k.shape[1]
        for b in range(B):
            offset = 0 if offsets is None else int(offsets[b])
            for h in range(H):
                inputs = (q[b, h], k[b, h // group], v[b, h // group])
                of_row = None if starts is None else starts[b]
                for first in reversed(range(0, T, cut.query_tile)):
                    block = sight_of(first, cut.query_tile, T, k.shape[2], offset, of_row)
                    for warp in range(cut.WARPS):
                        at = first + warp * cut.ROW_TILES * 16
                        if at < T:
                            self._warp(b, h, at, block, *inputs, of_row, offset)

    def _warp(self, b, h, first, block: Sight, q, k, v, starts, offset):
        cut, T, S = self.cut, len(q), len(k)
        rows = min(cut.ROW_TILES * 16, T - first)
        mine = sight_of(first, cut.ROW_TILES * 16, T, S, offset, starts)
        slope = self.scale * LOG2E
        out = np.zeros((rows, q.shape[1]), np.float32)
        base, total = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        limit = np.full(rows, -np.inf, np.float32)
        for at in _parts(block, cut):
            if at >= mine.end or at + cut.PART <= mine.begin:
                continue
            self.parts += 1
            keys, values = _zero_filled(k, at, cut.PART), _zero_filled(v, at, cut.PART)
            score = q[first : first + rows] @ keys.T
            if at < mine.full_begin or at + cut.PART > mine.full_end:
                self.masked += 1
                score = _masked(score, at, first, S, offset, starts)
            top = score.max(1)
            grows = top > limit
            blind = limit == -np.inf
            raised = np.where(grows, top * slope, base)
            factor = np.where(blind, np.float32(0), np.exp2(base - raised))
            base, limit = raised, np.where(grows, top + np.float32(LAZY) / slope, limit)
            p = np.exp2(score * slope - base[:, None])
            total = total * factor + p.sum(1)
            out = out * factor[:, None] + p @ values
        seen = limit > -np.inf
        with np.errstate(divide="ignore", invalid="ignore"):
            self.y[b, h, first : first + rows] = np.where(seen[:, None], out / total[:, None], 0)
            lse = base / LOG2E + np.log(total)
        self.lse[b, h, first : first + rows] = np.where(seen, lse, -np.inf)


def backward(q, k, v, y, lse, dy, starts, rows: int, tile: int):
    """dq, dk, dv in the order of the gradients' kernels: blocks of `rows`, tiles of `tile`.

    dq of a block is a sum over tiles of keys, the first key first; dk and dv of a block over the
    group's query heads in order, and within a head over tiles of queries, the first one first.
    """
    B, H, T, Dh = q.shape
    group, scale = H // k.shape[1], np.float32(1 / math.sqrt(Dh))
    dq, dk, dv = (np.zeros(x.shape, np.float32) for x in (q, k, v))
    delta = (dy * y).sum(-1)

    def pair(b, h, queries, keys):
        """p and ds of some queries and keys."""
        kv = h // group
        score = q[b, h, queries] @ k[b, kv, keys].T * scale
        of_row = None if starts is None else starts[b]
        score = _masked(score, keys.start, queries.start, T, 0, of_row)
        with np.errstate(invalid="ignore"):
            p = np.exp2((score - lse[b, h, queries, None]) * LOG2E)
        p = np.where(lse[b, h, queries, None] == -np.inf, np.float32(0), p)
        dp = dy[b, h, queries] @ v[b, kv, keys].T
        return p, p * (dp - delta[b, h, queries, None])

    for b in range(B):
        of_row = None if starts is None else starts[b]
        for h in range(H):
            for block in _slices(0, T, rows):
                sight = sight_of(block.start, rows, T, T, 0, of_row)
                for keys in _slices(sight.begin // tile * tile, sight.end, tile, most=T):
                    ds = pair(b, h, block, keys)[1]
                    dq[b, h, block] += ds @ k[b, h // group, keys]
        for kv in range(k.shape[1]):
            for block in _slices(0, T, rows):
                for h in range(kv * group, (kv + 1) * group):
                    for queries in _slices(block.start // tile * tile, T, tile):
                        if of_row is not None and of_row[queries].min() >= block.stop:
                            continue
                        p, ds = pair(b, h, queries, block)
                        dv[b, kv, block] += p.T @ dy[b, h, queries]
                        dk[b, kv, block] += ds.T @ q[b, h, queries]
    return dq * scale, dk * scale, dv


def _parts(block: Sight, cut: Geometry) -> Iterator[int]:
    """First keys of the parts that a block goes through."""
    first = block.begin // cut.KEY_TILE * cut.KEY_TILE
    end = -(-block.end // cut.KEY_TILE) * cut.KEY_TILE
    yield from range(first, end, cut.PART)


def _slices(first: int, end: int, size: int, most: int = LARGEST) -> Iterator[slice]:
    for at in range(first, end, size):
        yield slice(at, min(at + size, end if most == LARGEST else most))


def _zero_filled(x, first: int, count: int):
    rows = np.zeros((count, x.shape[1]), np.float32)
    found = x[first : first + count]
    rows[: len(found)] = found
    return rows


def _masked(score, first_key: int, first_row: int, keys: int, offset: int, starts):
    row = first_row + np.arange(score.shape[0])[:, None]
    key = first_key + np.arange(score.shape[1])[None, :]
    seen = key < np.minimum(keys, offset + row + 1)
    if starts is not None:
        seen &= key >= starts[first_row : first_row + score.shape[0], None]
    return np.where(seen, score, np.float32(-np.inf))
