"""Parameters and the flat buffers they live in.

All parameters of a model share four fp32 buffers: master weights, gradient and the two moments of
AdamW. A parameter is a view of each. One optimizer pass is one pass over memory, an all-reduce
bucket is a slice, a checkpoint is a table of names and views, and no address ever moves, which a
captured step relies on. Parameters that weight decay applies to come first.

With bf16 the decayed parameters, which are the matrices, also have a bf16 copy that the model
computes with; the optimizer writes it in the same pass. Gains stay fp32: a bf16 gain near 1 moves
in steps of 2**-7 and would not learn.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from xtrain.engine import rng
from xtrain.engine.device import Device
from xtrain.engine.dtype import bfloat16
from xtrain.engine.tensor import Tensor

ALIGNMENT = 64  # elements; every parameter starts at a multiple, so vector loads never straddle two

# Pairs of weights that a thread draws at a time: the fastest of 2**15 to 2**19 on two cores with
# 2 MB of cache each. With fewer, threads wait for the interpreter's lock; with more, temporaries
# leave the cache.
SLICE = 1 << 17


def padded_rows(rows: int) -> int:
    """The rows in memory of a matrix whose products should be fast: 50257 -> 50304."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Part:
    """A named range of rows of a fused parameter: q_proj of [q_proj | k_proj | v_proj]."""

    name: str
    rows: int


class Parameter(Tensor):
    """A leaf whose storage is a view of the flat buffers once `FlatBuffers` has placed it.

    shape: as stored. std: standard deviation of the normal initialization; None means ones.
    rows: rows that are real; the rest is padding, initialized to zero and never updated.
    """

    __slots__ = ("decay", "declared", "parts", "rows", "std")

    def __init__(self, shape, *, std: float | None, decay: bool, rows=None, parts=()):
        super().__init__(None, requires_grad=True)
        self.declared = tuple(shape)
        self.std = std
        self.decay = decay
        self.rows = shape[0] if rows is None else rows
        self.parts: tuple[Part, ...] = tuple(parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.declared

    @property
    def size(self) -> int:
        """Stored elements, padding included."""
        return int(np.prod(self.declared))

    @property
    def count(self) -> int:
        """Elements that are real parameters, padding excluded."""
        return self.size // self.declared[0] * self.rows

    def accumulate_grad(self, gradient) -> None:
        self.grad += gradient


class FlatBuffers:
    """Master weights, gradient and moments of a model, allocated once on a device.

    parameters: (name, Parameter) pairs. After construction every parameter's `data` and `grad` are
    views. `decayed` is the number of leading elements that weight decay applies to.
    precision: fp32, or bf16 for a `copy` (decayed,) of the matrices to compute with. training:
    False for weights alone, a quarter of the memory.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Parameter]],
        device: Device,
        precision: str = "fp32",
        *,
        training: bool = True,
    ):
        named = sorted(parameters, key=lambda item: not item[1].decay)  # stable: decayed first
        self.offsets: dict[str, int] = {}
        self.parameters = dict(named)
        at = decayed = 0
        for name, p in named:
            self.offsets[name] = at
            at += -(-p.size // ALIGNMENT) * ALIGNMENT
            if p.decay:
                decayed = at
        self.size, self.decayed = at, decayed
        self.master = device.flat(at, np.float32)
        self.grad = device.flat(at, np.float32) if training else None
        self.moment1 = device.flat(at, np.float32) if training else None
        self.moment2 = device.flat(at, np.float32) if training else None
        self.copy = device.flat(decayed, bfloat16) if precision == "bf16" else None
        for name, p in named:
            computed = self.copy is not None and p.decay
            p.data = self.view(self.copy if computed else self.master, name)
            p.grad = self.view(self.grad, name) if training else None

    def keep_weights_(self) -> None:
        """Give up what only training needs, the gradient and the moments."""
        self.grad = self.moment1 = self.moment2 = None
        for p in self.parameters.values():
            p.grad = None

    def release_(self) -> None:
        """Give up the weights too: the model cannot be used any more, whoever still holds it."""
        self.keep_weights_()
        self.master = self.copy = None
        for p in self.parameters.values():
            p.data = None

    def view(self, buffer, name: str):
        """The part of a flat buffer that belongs to a parameter, in its shape."""
        p, at = self.parameters[name], self.offsets[name]
        return buffer[at : at + p.size].reshape(p.declared)

    def initialize(self, seed: int, device: Device) -> None:
        """Draw the initial weights; each parameter's depend only on the seed and its name.

        A fused parameter draws each part by the part's own name, so that fusing q, k and v or not
        gives the same model.
        """
        key = rng.key_array(np, seed, 0)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for name, p in self.parameters.items():
                # Nothing names the host's array, so it is gone before the next one is drawn.
                self.view(self.master, name)[...] = device.array(
                    initial_weights(name, p, key, pool)
                )
        self.refresh_copy()

    def refresh_copy(self) -> None:
        """Round the masters into the bf16 copy, after something other than a step set them."""
        if self.copy is not None:
            self.copy[...] = self.master[: self.decayed].astype(bfloat16)


def initial_weights(
    name: str, p: Parameter, key, pool: ThreadPoolExecutor, *, pairs: int = SLICE
) -> np.ndarray:
    """The values that a parameter starts with: float32 in its shape, padding rows zero.

    key: as from `rng.key_array`. Drawn by the pool's threads in slices of `pairs` pairs; neither
    changes a bit of them.
    """
    if p.std is None:
        return np.ones(p.declared, np.float32)
    weights = np.zeros(p.declared, np.float32)
    slices = [
        (weights[start : start + rows].reshape(-1), rng.site_of(f"init/{part_name}"), first)
        for part_name, start, rows in part_rows(name, p)
        for first in range(0, -(-rows * (p.size // p.declared[0]) // 2), pairs)
    ]

    def draw(piece: tuple[np.ndarray, int, int]) -> None:
        part, site, first = piece
        half = -(-part.size // 2)
        last = min(first + pairs, half)
        early, late = rng.normal_pairs(np, part.size, key, site, first, last)
        np.multiply(p.std, early, out=part[first:last])
        partners = part[half + first : half + last]  # one fewer at the end of an odd part
        np.multiply(p.std, late[: partners.size], out=partners)

    for _ in pool.map(draw, slices):
        pass  # raises here what a thread raised
    return weights


def part_rows(name: str, p: Parameter) -> list[tuple[str, int, int]]:
    """(full name, first row, rows) of each part; the parameter itself when it is not fused.

    `layers.0.self_attn.qkv_proj.weight` has the parts `layers.0.self_attn.q_proj.weight`, ...
    """
    if not p.parts:
        return [(name, 0, p.rows)]
    prefix, _, leaf = name.rpartition(".")
    prefix = prefix.rpartition(".")[0]
    found, start = [], 0
    for part in p.parts:
        found.append((".".join(filter(None, (prefix, part.name, leaf))), start, part.rows))
        start += part.rows
    return found
