"""draft"""
import numpy as np
from numba import njit, prange
from xtrain.cpu.tile import LANES, ROWS, add_multiply_tile, exp2_sum_tile, exp2_tile

CHUNK = 64
GROUP = 64  # rows of x whose probabilities are kept at a time
PART = 2048
SLACK = np.float32(24)
LOG2E = 1.4426950408889634

@njit(cache=True)
def load_words(weight, first, last, words):
    D = weight.shape[1]
    for i in range(last - first):
        for d in range(D):
            words[i, d] = weight[first + i, d]
    for i in range(last - first, words.shape[0]):
        for d in range(words.shape[1]):
            words[i, d] = 0

@njit(parallel=True, cache=True)
def log_sum_exp(panels, weight, vocab, shift, total):
    """panels (P, D, LANES) holds x log2 e transposed"""
    P, D, _ = panels.shape
    parts = shift.shape[0]
    for part in prange(parts):
        words = np.empty((CHUNK, D), np.float32)
        bias = np.zeros(CHUNK, np.float32)
        peak = np.empty(LANES, np.float32)
        now = np.empty(LANES, np.float32)
        ref = np.empty((P, LANES), np.float32)
        ref[:] = -np.inf
        first_part = part * PART
        last_part = min(first_part + PART, vocab)
        for first in range(first_part, last_part, CHUNK):
            last = min(first + CHUNK, last_part)
            load_words(weight, first, last, words)
            bias[last - first:] = -np.inf
            rows = (last - first + ROWS - 1) // ROWS * ROWS
            for p in range(P):
                for attempt in range(2):
                    for j in range(LANES):
                        peak[j] = -np.inf
                        now[j] = 0
                    for v in range(0, rows, ROWS):
                        exp2_sum_tile(words, v * D, D, 1, panels, p * D * LANES, LANES, D, bias, v, ref[p], now, peak, 0)
                    raised = False
                    for j in range(LANES):
                        if peak[j] > ref[p, j] + SLACK:
                            raised = True
                    if not raised:
                        break
                    for j in range(LANES):
                        if peak[j] > ref[p, j] + SLACK:
                            if ref[p, j] > -np.inf:
                                total[part, p * LANES + j] *= 2.0 ** (np.float64(ref[p, j]) - np.float64(peak[j]))
                            ref[p, j] = peak[j]
                for j in range(LANES):
                    total[part, p * LANES + j] += now[j]
        for p in range(P):
            for j in range(LANES):
                shift[part, p * LANES + j] = ref[p, j]

@njit(parallel=True, cache=True)
def gradients(panels, rows_x, weight, vocab, lse2, dweight, dx_parts):
    """rows_x (P*LANES, Dp) scaled x; lse2 (P*LANES)"""
    P, D, _ = panels.shape
    Dp = rows_x.shape[1]
    parts = dx_parts.shape[0]
    stride = GROUP + 16
    per = GROUP // LANES
    for part in prange(parts):
        words = np.empty((CHUNK, Dp), np.float32)
        dwords = np.empty((CHUNK, Dp), np.float32)
        prob = np.empty((CHUNK, stride), np.float32)
        first_part = part * PART
        last_part = min(first_part + PART, vocab)
        for first in range(first_part, last_part, CHUNK):
            last = min(first + CHUNK, last_part)
            load_words(weight, first, last, words)
            dwords[:] = 0
            rows = (last - first + ROWS - 1) // ROWS * ROWS
            for g in range(0, P, per):
                panels_here = min(per, P - g)
                for p in range(g, g + panels_here):
                    for v in range(0, rows, ROWS):
                        exp2_tile(words, v * Dp, Dp, 1, panels, p * D * LANES, LANES, D, lse2, p * LANES, prob, v * stride + (p - g) * LANES, stride)
                    for d in range(0, Dp, ROWS):
                        add_multiply_tile(words, d, 1, Dp, prob, (p - g) * LANES, stride, rows, dx_parts, ((part * P + p) * Dp + d) * LANES, LANES)
                for v in range(0, rows, ROWS):
                    for d in range(0, Dp, LANES):
                        add_multiply_tile(prob, v * stride, stride, 1, rows_x, g * LANES * Dp + d, Dp, panels_here * LANES, dwords, v * Dp + d, Dp)
            for i in range(last - first):
                for d in range(D):
                    dweight[first + i, d] += dwords[i, d]
