"""T18: dropout masks are a function of (seed, step, site, micro-batch), wherever they are drawn.

Claim   The mask is the same on every device and for any number of threads, and another one for
        another seed, step, site or micro-batch; it keeps 1 - p of the elements and the mean, within
        4 sigma; p = 0 and evaluation change no bit; recomputed blocks see the same masks.
Why     A mask that is not drawn again in backward, or that never changes, still lowers the loss.
Reads   Nothing.
Needs   A CPU or one CUDA device. About 5 seconds.
"""

import itertools
from dataclasses import replace
from unittest import mock

import numba
import numpy as np

from gates.instruments import tiny_run
from gates.instruments.bits import differing_bits
from gates.judging.gate import Defect, Gate
from xtrain.engine import device as devices
from xtrain.engine import ops, rng
from xtrain.engine.device import Device
from xtrain.engine.ops.dropout import keep_mask
from xtrain.engine.tensor import Tensor, no_tape
from xtrain.engine.testing import worst
from xtrain.models import qwen3
from xtrain.train.objectives.next_token import next_token

N = 1_000_003  # no multiple of the 4 elements of a Philox block
RATES = (0.1, 0.5, 0.9)
SITE = rng.site_of("dropout/0/attn")
DRAWS = 400  # of the mean
MICRO_BATCH = 3
REMAT = ("none", "mlp", "block")


def same_everywhere(device: str) -> dict[str, float]:
    """Elements that differ from the mask of NumPy by the definition, on one thread and on all."""
    here = devices.use(device)
    key = rng.key_array(np, 2**40 + 5, 7, MICRO_BATCH)
    differing = 0
    for p in RATES:
        truth = keep_mask(np, (N,), N, key, p, SITE)
        for threads in {1, numba.config.NUMBA_NUM_THREADS}:
            numba.set_num_threads(threads)
            try:
                found = _dropped(here, np.ones(N, np.float32), key, p)
            finally:
                numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
            differing += sum(differing_bits(each, truth) for each in found)
    return {"mask_differing_elements": float(differing)}


def own_place(device: str) -> dict[str, float]:
    """How many of seed, step, site and micro-batch may change without changing the mask.

    The seed counts twice, as it has two words. Two masks of p = 1/2 agree in half of the elements.
    """
    here = devices.use(device)
    base = {"seed": 5, "step": 7, "micro": 3, "site": SITE}
    changes = [{"seed": 6}, {"seed": 5 + 2**32}, {"step": 8}, {"micro": 4}, {"site": SITE + 1}]

    def mask(seed, step, micro, site):
        key = rng.key_array(np, seed, step, micro)
        return _dropped(here, np.ones(N, np.float32), key, 0.5, site)[0]

    first = mask(**base)
    agreeing = [(mask(**{**base, **change}) == first).mean() for change in changes]
    return {"places_with_the_same_mask": float(sum(abs(share - 0.5) > 0.01 for share in agreeing))}


def rates(device: str) -> dict[str, float]:
    """How many standard deviations the share kept and the mean of the output are off, at most."""
    here = devices.use(device)
    ones = np.ones(N, np.float32)
    kept = [0.0]
    for p, seed in itertools.product(RATES, range(3)):
        y, _ = _dropped(here, ones, rng.key_array(np, seed, 0), p)
        kept.append(abs((y > 0).sum() - N * (1 - p)) / np.sqrt(N * p * (1 - p)))
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    off = []
    for p in RATES:
        keys = (rng.key_array(np, 0, step) for step in range(DRAWS))
        total = sum(_dropped(here, x, key, p)[0].astype(np.float64) for key in keys)
        # Along x itself: the factor by which the mean output is x, whose expectation is 1.
        factor = (total / DRAWS) @ x / (x @ x)
        sigma = np.sqrt(p / (1 - p) / DRAWS * (x**4).sum()) / (x @ x)
        off.append(abs(factor - 1) / sigma)
    return {"keep_rate_sigmas": worst(kept), "mean_sigmas": worst(off)}


def nothing_dropped(device: str) -> dict[str, float]:
    """Values that p = 0 changes, in both directions, and that evaluation of a model changes."""
    here = devices.use(device)
    x = np.random.default_rng(0).standard_normal(N).astype(np.float32)
    found = _dropped(here, x, rng.key_array(np, 0, 0), 0.0)
    evaluated = [_logits(here, dropout) for dropout in (0.0, 0.5)]
    return {
        "p_0_differing_values": float(sum(differing_bits(each, x) for each in found)),
        "eval_differing_values": float(differing_bits(*evaluated)),
    }


def recomputed(device: str) -> dict[str, float]:
    """Values of the gradient that differ when blocks are recomputed, and whether anything drops."""
    none, *others = (_gradient(device, mode, 0.2) for mode in REMAT)
    undropped = _gradient(device, "none", 0.0)
    if differing_bits(none, undropped) == 0:
        raise RuntimeError("dropout of 0.2 changed no gradient")
    return {"remat_differing_values": float(sum(differing_bits(none, each) for each in others))}


def replayed(device: str) -> dict[str, float]:
    """Replays of a step, captured on a GPU, that drop the same elements as the one before."""
    here = devices.use(device)
    x, key = here.array(np.ones(N, np.float32)), here.array(rng.key_array(np, 0, 0))
    step = here.capture(lambda: (ops.dropout.run(x, key, p=0.5, site=SITE),))
    masks = []
    for number in range(6):
        here.write(key, rng.key_array(np, 0, number))
        masks.append(here.host(step()[0]).copy())
    old = sum(differing_bits(one, other) == 0 for one, other in itertools.pairwise(masks))
    return {"replays_with_an_old_mask": float(old)}


def _dropped(here: Device, x: np.ndarray, key, p: float, site: int = SITE):
    """(output, gradient for an output gradient of x) on the host."""
    array, key = here.array(x), here.array(key)
    chosen = ops.dropout.implementation((array, key))
    y, saved = chosen.forward(here.xp, array, key, p=p, site=site)
    dx, _ = chosen.backward(here.xp, array, saved, p=p, site=site)
    return here.host(y), here.host(dx)


def _logits(here: Device, dropout: float) -> np.ndarray:
    tiny = tiny_run.build(here, dropout=dropout)
    ids = tiny_run.token_stream(32).reshape(2, 16).astype(np.int32)
    with no_tape():
        return here.host(tiny.model.logits(tiny.model(here.array(ids))).data).copy()


def _gradient(device: str, mode: str, dropout: float) -> np.ndarray:
    here = devices.use(device)
    tiny = tiny_run.build(here, dropout=dropout, remat=mode)
    ids = tiny_run.token_stream(34).reshape(2, 17).astype(np.int32)
    batch = {"input_ids": here.array(ids[:, :-1]), "targets": here.array(ids[:, 1:])}
    key = here.array(rng.key_array(np, 3, 4))
    next_token(tiny.model, batch, here.array(np.float32(1 / 32)), key).backward()
    return here.host(tiny.buffers.grad).copy()


def _masked(mask):
    """Dropout on every device by mask(sound, xp, size, key, p, site), (size,) fp32 factors."""

    def wrong(xp, x, key, p, site):
        return x * mask(rng.bits, xp, x.size, key, p, site).reshape(x.shape).astype(x.dtype)

    implementation = replace(
        ops.dropout.reference,
        forward=lambda xp, x, key, *, p, site: (wrong(xp, x, key, p, site), key),
        backward=lambda xp, dy, saved, *, p, site: (wrong(xp, dy, saved, p, site), None),
    )
    return mock.patch.object(ops.dropout, "implementation", lambda arrays: implementation)


def _threshold(bits, xp, p, kept=None):
    kept = 1 - p if kept is None else kept
    return (bits >= xp.uint32(round(p * 2**32))).astype(xp.float32) * xp.float32(1 / kept)


def _mask_depends_on_the_threads():
    return _masked(
        lambda bits, xp, n, key, p, site: _threshold(
            xp.roll(bits(xp, n, key, site), numba.get_num_threads()), xp, p
        )
    )


def _site_is_forgotten():
    return _masked(lambda bits, xp, n, key, p, site: _threshold(bits(xp, n, key, 1), xp, p))


def _bits_are_fifteen():
    """A probability that is rounded to 1/128 beforehand."""
    return _masked(
        lambda bits, xp, n, key, p, site: _threshold(
            bits(xp, n, key, site), xp, round(p * 128) / 128, 1 - p
        )
    )


def _what_is_kept_is_not_scaled():
    return _masked(lambda bits, xp, n, key, p, site: _threshold(bits(xp, n, key, site), xp, p, 1.0))


def _zero_is_not_exact():
    return _masked(
        lambda bits, xp, n, key, p, site: _threshold(bits(xp, n, key, site), xp, p + 1e-5, 1 - p)
    )


def _masks_move_on_with_every_draw():
    count = itertools.count()
    return _masked(
        lambda bits, xp, n, key, p, site: _threshold(bits(xp, n, key, site + next(count)), xp, p)
    )


def _evaluation_drops_too():
    def drop(self, x: Tensor, context, which: int) -> Tensor:
        key = context.key
        if key is None:
            key = devices.current().array(rng.key_array(np, 0, 0))
        return ops.dropout(x, key, p=self.dropout, site=self.sites[which])

    return mock.patch.object(qwen3.Block, "drop", drop)


def _replays_keep_the_first_key():
    kind = type(devices.current())
    sound = kind.write

    def write(self, array, host):
        if array.shape != (4,):
            sound(self, array, host)

    return mock.patch.object(kind, "write", write)


GATE = Gate(
    "T18",
    "Dropout",
    measures=(same_everywhere, own_place, rates, nothing_dropped, recomputed, replayed),
    defects=(
        Defect("threads", "mask_differing_elements", same_everywhere, _mask_depends_on_the_threads),
        Defect("no site", "places_with_the_same_mask", own_place, _site_is_forgotten),
        Defect("coarse p", "keep_rate_sigmas", rates, _bits_are_fifteen),
        Defect("not scaled", "mean_sigmas", rates, _what_is_kept_is_not_scaled),
        Defect("p above 0", "p_0_differing_values", nothing_dropped, _zero_is_not_exact),
        Defect("evaluation", "eval_differing_values", nothing_dropped, _evaluation_drops_too),
        Defect(
            "moving masks", "remat_differing_values", recomputed, _masks_move_on_with_every_draw
        ),
        Defect("first key", "replays_with_an_old_mask", replayed, _replays_keep_the_first_key),
    ),
)
