"""The head's product and cross-entropy on the CPU: three matrix products, no logits kept.

GROUP tokens at a time, over parts of the vocabulary that threads share:

    score:    E = 2**(log2(e) x @ w.T - shift), its sums, and E @ w while a chunk of E is in cache;
              shift, a number for each token and part, is at most SLACK bits below the largest logit
    combine:  log-sum-exp over the parts; each part's E is off by a factor that is known only now
    spread:   dweight += E.T @ (factor * coefficient * x)

The factors scale x and the parts of dx, never E. So each exponential is taken once, and E (words x
GROUP floats, reused by all groups) is written and read once. E is stored word by word, with tokens
as vector lanes, so sums and maxima over the vocabulary need no shuffles. Only tokens with targets
are computed, and the target's own term is added at the end.

Recomputing E instead of keeping it costs a fourth product: 50 ms against 45 on one core for 512
tokens, D = 32, 50,257 words. NumPy's BLAS needs 64 ms for the three products alone.

x: (N, D) fp32.  weight: (Vpad, D) fp32.  Logits and exponentials in fp32; log-sum-exp and losses in
float64. The partition depends on shapes alone and every sum has one order, so the bits do not
depend on the number of threads.
"""

import numpy as np
from numba import njit, prange

from xtrain.cpu.parallel import PRANGE_ONLY
from xtrain.cpu.tile import LANES, ROWS, add_multiply_tile, exp2_tile, multiply_tile
from xtrain.engine.chunks import LOSS_TOKENS
from xtrain.engine.ops.linear_cross_entropy import (
    linear_cross_entropy,
    require_start,
    token_logprob,
)
from xtrain.engine.tensor import SEED

GROUP = LOSS_TOKENS  # larger means less traffic of dweight, smaller a smaller E
CHUNK = 64  # tokens of the vocabulary whose E is used again while in cache
PARTS = 32  # of the vocabulary, shared by threads
SLACK = np.float32(24)  # bits that a logit may exceed the shift by before the shift is raised
LOG2E = np.float32(1.4426950408889634)
LN2 = 0.6931471805599453


def loss_forward(xp, x, weight, targets, scale, *, vocab_size, dweight_into=None):
    """See `xtrain.engine.ops.linear_cross_entropy`."""
    flat = _checked(targets, vocab_size)
    if dweight_into is None:
        logp = _log_probabilities(x, weight, flat, vocab_size)
        return _loss(logp, scale), (x, weight, flat, scale)
    logp, dx = _gradients(x, weight, flat, np.full(flat.size, scale), vocab_size, dweight_into)
    return _loss(logp, scale), (dx,)


def loss_backward(xp, dy, saved, *, vocab_size, dweight_into=None, into):
    """See `xtrain.engine.ops.linear_cross_entropy`."""
    if dweight_into is not None:
        require_start(dy)
        return saved[0], None, None, None
    x, weight, flat, scale = saved
    factor = scale if dy is SEED else scale * dy
    dweight = np.zeros_like(weight) if into[0] is None else into[0]
    _, dx = _gradients(x, weight, flat, np.full(flat.size, factor), vocab_size, dweight)
    return dx, dweight if into[0] is None else None, None, None


def logprob_forward(xp, x, weight, targets, *, vocab_size):
    """See `xtrain.engine.ops.linear_cross_entropy`."""
    flat = _checked(targets, vocab_size)
    y = np.zeros(flat.shape, np.float32)
    y[flat >= 0] = _log_probabilities(x, weight, flat, vocab_size)
    return y.reshape(targets.shape), (x, weight, flat)


def logprob_backward(xp, dy, saved, *, vocab_size, into):
    """See `xtrain.engine.ops.linear_cross_entropy`."""
    x, weight, flat = saved
    dweight = np.zeros_like(weight) if into[0] is None else into[0]
    _, dx = _gradients(x, weight, flat, -dy.reshape(-1), vocab_size, dweight)
    return dx, dweight if into[0] is None else None, None


def _checked(targets, vocab_size):
    """The targets as (N,); one beyond the vocabulary would write outside of the gradient."""
    flat = np.ascontiguousarray(targets, np.int32).reshape(-1)
    if flat.max(initial=0) >= vocab_size:
        raise ValueError(f"cross entropy: target {flat.max()} of {vocab_size} words")
    return flat


def _loss(logp, scale):
    return np.asarray(-logp.sum() * np.float64(scale))


def _log_probabilities(x, weight, flat, vocab_size):
    """log p of each target that is not ignored, float64."""
    valid = np.flatnonzero(flat >= 0)
    none, no_rows = np.empty(0, np.float32), np.empty((0, 0), np.float32)
    logp, _ = _run(_rows(x, valid), weight, flat[valid], vocab_size, none, no_rows)
    return logp


def _gradients(x, weight, flat, coefficient, vocab_size, dweight):
    """log p, and dx of sum(-coefficient * log p); dweight is added in place."""
    valid = np.flatnonzero(flat >= 0)
    chosen = coefficient[valid].astype(np.float32)
    logp, drows = _run(_rows(x, valid), weight, flat[valid], vocab_size, chosen, dweight)
    if valid.size == flat.size:
        return logp, drows.reshape(x.shape)
    dx = np.zeros((flat.size, x.shape[-1]), np.float32)
    dx[valid] = drows
    return logp, dx.reshape(x.shape)


def _rows(x, valid):
    """The rows of x (..., D) with these indices, without a copy when they are all."""
    rows = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
    return rows if valid.size == rows.shape[0] else rows[valid]


@njit(parallel=PRANGE_ONLY, cache=True)
def _run(x, weight, targets, vocab_size, coefficient, dweight):
    """log p (n,) float64 and, where dweight has rows, dx (n, D); dweight is added to."""
    n, D = x.shape
    train = dweight.shape[0] > 0
    parts = min(PARTS, (vocab_size + CHUNK - 1) // CHUNK)
    logp = np.empty(n, np.float64)
    dx = np.empty((n if train else 0, D), np.float32)
    # Rows of E: the whole vocabulary, or one chunk a part when only sums are wanted.
    E = np.empty((_round_up(vocab_size, CHUNK) if train else parts * CHUNK, GROUP), np.float32)
    shift = np.empty((parts, GROUP), np.float32)
    total = np.empty((parts, GROUP), np.float64)
    factor = np.empty((parts, GROUP), np.float32)
    partial = np.empty((parts, GROUP // LANES, _round_up(D, ROWS), LANES), np.float32)
    panels = np.empty((GROUP // LANES, D, LANES), np.float32)
    groups = (n + GROUP - 1) // GROUP
    for group in range(groups + 1):
        first = group * GROUP
        last = min(first + GROUP, n)
        if group < groups:
            _load_panels(x, first, last, panels)
        # A part of E is spread and then overwritten by the thread that has it in its cache.
        for p in prange(parts):
            part = np.int64(p)
            if train and group > 0:
                before, end = first - GROUP, min(first, n)
                _spread(x, before, end, coefficient, vocab_size, part, parts, E, factor, dweight)
            if group < groups:
                _score(
                    panels, last - first, weight, vocab_size, part, parts, train,
                    E, shift, total, partial,
                )  # fmt: skip
        if group < groups:
            _combine(x, first, last, weight, targets, shift, total, logp, factor)
            if train:
                _finish_dx(first, last, weight, targets, coefficient, factor, partial, dx)
    for i in range(n if train else 0):
        for d in range(D):
            dweight[targets[i], d] -= coefficient[i] * x[i, d]
    return logp, dx


@njit(cache=True)
def _round_up(size, multiple):
    return (size + multiple - 1) // multiple * multiple


@njit(cache=True)
def _load_panels(x, first, last, panels):
    """Transpose a group of tokens into panels of LANES; absent tokens are zero."""
    panels.fill(0)
    for i in range(last - first):
        for d in range(x.shape[1]):
            panels[i // LANES, d, i % LANES] = x[first + i, d] * LOG2E


@njit(cache=True)
def _load_words(weight, first, last, words, bias):
    """Copy rows of weight; absent ones are zero and their bias takes them out of every sum."""
    words.fill(0)
    bias.fill(-np.inf)
    for i in range(last - first):
        bias[i] = 0
        for d in range(weight.shape[1]):
            words[i, d] = weight[first + i, d]


@njit(cache=True)
def _bounds(part, parts, vocab_size):
    """First and last word of a part; parts are whole chunks, as equal as can be."""
    chunks = (vocab_size + CHUNK - 1) // CHUNK
    return part * chunks // parts * CHUNK, min((part + 1) * chunks // parts * CHUNK, vocab_size)


@njit(cache=True)
def _score(panels, tokens, weight, vocab_size, part, parts, train, E, shift, total, partial):
    """E of one part of the vocabulary, its sums, and weight.T @ E in partial[part]."""
    width = partial.shape[2]
    words = np.empty((CHUNK, width), np.float32)
    bias = np.empty(CHUNK, np.float32)
    bound = np.empty(GROUP, np.float32)
    summed = np.empty(LANES, np.float32)
    peak = np.empty(LANES, np.float32)
    bound.fill(0)
    total[part].fill(0)
    partial[part].fill(0)
    start, stop = _bounds(part, parts, vocab_size)
    for first in range(start, stop, CHUNK):
        last = min(first + CHUNK, stop)
        rows = _round_up(last - first, ROWS)
        row = first if train else part * CHUNK
        _load_words(weight, first, last, words, bias)
        for p in range((tokens + LANES - 1) // LANES):
            if first == start:  # the first tile's maximum is the first shift
                _exponentials(words, ROWS, bias, panels, p, bound, summed, peak, E, row)
                for j in range(LANES):
                    bound[p * LANES + j] = peak[j]
            _exponentials(words, rows, bias, panels, p, bound, summed, peak, E, row)
            while _exceeds(peak, bound, p):
                kept = first - start if train else 0
                _raise_bound(bound, peak, p, total, partial, part, E, start, kept)
                _exponentials(words, rows, bias, panels, p, bound, summed, peak, E, row)
            for j in range(LANES):
                total[part, p * LANES + j] += summed[j]
            if train:
                a = (part * partial.shape[1] + p) * width
                for d in range(0, width, ROWS):
                    add_multiply_tile(
                        words, d, 1, width, E, row * GROUP + p * LANES, GROUP, rows,
                        partial, (a + d) * LANES, LANES,
                    )  # fmt: skip
    for j in range(GROUP):
        shift[part, j] = bound[j]


@njit(cache=True)
def _exponentials(words, rows, bias, panels, p, bound, summed, peak, E, row):
    """E for one chunk and panel, its column sums, and the largest exponents (without shift)."""
    D, width = panels.shape[1], words.shape[1]
    summed.fill(0)
    peak.fill(-np.inf)
    for v in range(0, rows, ROWS):
        exp2_tile(
            words, v * width, width, 1, panels, p * D * LANES, LANES, D, bias, v,
            bound, p * LANES, summed, peak, E, (row + v) * GROUP + p * LANES, GROUP,
        )  # fmt: skip


@njit(cache=True)
def _exceeds(peak, bound, p):
    exceeded = False
    for j in range(LANES):
        exceeded |= peak[j] > bound[p * LANES + j] + SLACK
    return exceeded


@njit(cache=True)
def _raise_bound(bound, peak, p, total, partial, part, E, start, kept):
    """Raise the bound to the peak where it is exceeded, and rescale what was made with it."""
    for j in range(LANES):
        lane = p * LANES + j
        if peak[j] > bound[lane] + SLACK:
            factor = np.float32(np.exp2(bound[lane] - peak[j]))
            bound[lane] = peak[j]
            total[part, lane] *= factor
            for d in range(partial.shape[2]):
                partial[part, p, d, j] *= factor
            for v in range(start, start + kept):
                E[v, lane] *= factor


@njit(cache=True)
def _combine(x, first, last, weight, targets, shift, total, logp, factor):
    """log p of each target, and 2**shift / (sum of exponentials) of each part; NaN stays NaN."""
    parts = shift.shape[0]
    ratio = np.empty(parts, np.float64)
    for i in range(first, last):
        lane = i - first
        largest = shift[0, lane]
        for part in range(1, parts):
            largest = max(largest, shift[part, lane])
        summed = 0.0
        for part in range(parts):
            ratio[part] = np.exp2(np.float64(shift[part, lane]) - largest)
            summed += ratio[part] * total[part, lane]
        for part in range(parts):
            factor[part, lane] = ratio[part] / summed
        dot = 0.0
        for d in range(x.shape[1]):
            dot += np.float64(x[i, d]) * np.float64(weight[targets[i], d])
        logp[i] = dot - (largest + np.log2(summed)) * LN2


@njit(cache=True)
def _finish_dx(first, last, weight, targets, coefficient, factor, partial, dx):
    """dx from the parts' sums over the vocabulary, less the target's row."""
    parts, _, width, _ = partial.shape
    summed = np.empty((width, LANES), np.float32)
    for p in range((last - first + LANES - 1) // LANES):
        summed.fill(0)
        for part in range(parts):
            for d in range(width):
                for j in range(LANES):
                    summed[d, j] += factor[part, p * LANES + j] * partial[part, p, d, j]
        for i in range(first + p * LANES, min(first + (p + 1) * LANES, last)):
            for d in range(dx.shape[1]):
                own = summed[d, i - first - p * LANES] - weight[targets[i], d]
                dx[i, d] = coefficient[i] * own


@njit(cache=True)
def _spread(x, first, last, coefficient, vocab_size, part, parts, E, factor, dweight):
    """dweight += E @ (factor * x) for one part of the vocabulary; absent tokens count as zero."""
    D = x.shape[1]
    width = _round_up(D, LANES)
    scaled = np.zeros((GROUP, width), np.float32)
    spare = np.empty((ROWS, LANES), np.float32)
    for i in range(last - first):
        for d in range(D):
            scaled[i, d] = factor[part, i] * coefficient[first + i] * x[first + i, d]
    lanes = _round_up(last - first, LANES)
    start, stop = _bounds(part, parts, vocab_size)
    for v in range(start, stop, ROWS):
        a = v * GROUP
        for d in range(0, D, LANES):
            if v + ROWS <= stop and d + LANES <= D:
                add_multiply_tile(E, a, GROUP, 1, scaled, d, width, lanes, dweight, v * D + d, D)
            else:
                multiply_tile(E, a, GROUP, 1, scaled, d, width, lanes, spare, 0, LANES)
                for i in range(min(ROWS, stop - v)):
                    for j in range(min(LANES, D - d)):
                        dweight[v + i, d + j] += spare[i, j]


linear_cross_entropy.fuse("cpu", loss_forward, loss_backward, accumulates=(1,))
token_logprob.fuse("cpu", logprob_forward, logprob_backward, accumulates=(1,))
