"""Cross-entropy of rows of logits: log-probability of the target and the gradient, in place.

    logp = z[target] - log sum exp z,   dz = coefficient (softmax(z) - onehot(target))

over the first `vocab_size` columns; the columns beyond are padding and get gradient 0. Arithmetic
is fp32. Two kernels:

    held in shared memory   `cross_entropy.cu`, bf16 logits and gradient: a row is read once, and
                            the next one arrives meanwhile
    one block a row         Numba, any dtype and length: the first pass keeps a running maximum and
                            sum a thread, the second reads the row again while it is still in the
                            second-level cache and writes the gradient

Bytes a logit of s bytes, gradient of r: s + r (the second kernel s more from the cache). The loss
is the sum of the rows' log-probabilities, by one block.
"""

import functools

import numpy as np
from numba import cuda
from numba.types import float32, float64, int64

from xtrain.cuda.compile import nvrtc
from xtrain.cuda.compile.launch import SIMULATED, Kernel, i64, pointer
from xtrain.cuda.parts.block import row_max, row_sum
from xtrain.cuda.parts.formula import LOG2_E, exp2, log2
from xtrain.cuda.parts.vectors import VECTOR_BYTES, are_aligned, scalar_access, vector_access
from xtrain.engine.dtype import bfloat16

MOST_THREADS = 1024  # one block a multiprocessor: its row stays in the second-level cache
VALUES = 16  # fp32 values in flight a thread; more would not fit the registers of 1024 threads
# Of the one block that sums a loss; each costs a thread of the host in the simulator.
SUM_THREADS = 64 if SIMULATED else 512
sum_of_block = row_sum(SUM_THREADS)
LOG2E, LN2 = np.float32(LOG2_E), np.float32(1 / LOG2_E)
LOWEST = np.float32(-3.0e38)  # below every logit, and its difference from one is finite
HELD_BYTES = 100_864  # of a row in shared memory; a block of every GPU from sm_80 on has 99 KiB
HELD_THREADS = 512  # of a block at most: two blocks a multiprocessor, 64 registers a thread


@functools.cache
def rows_kernel(dtype, out_dtype, aligned: bool, threads: int, differentiates: bool) -> Kernel:
    width, load, _ = vector_access(dtype, aligned)
    load_one = scalar_access(dtype)[0]
    store = vector_access(out_dtype, aligned, width).store
    largest, total = row_max(threads), row_sum(threads)
    vectors, values, piece = VALUES // width, VALUES, VALUES * threads

    def cross_entropy(z, targets, coefficient, logp, dz, columns, vocab_size, pitch):
        scratch = cuda.shared.array(threads, float32)
        v = cuda.local.array(values, float32)
        row = cuda.blockIdx.x
        base = row * columns
        target = int64(targets[row])
        counts = target >= 0
        peak, weight = LOWEST, float32(0)
        for start in range(0, vocab_size if counts else 0, piece):
            for w in range(vectors):
                at = start + (w * threads + cuda.threadIdx.x) * width
                load(z, base + at, columns - at, v, w * width)
            higher = peak
            for w in range(vectors):
                at = start + (w * threads + cuda.threadIdx.x) * width
                for i in range(width):
                    j = w * width + i
                    v[j] = v[j] * LOG2E if at + i < vocab_size else LOWEST
                    higher = max(higher, v[j])
            weight *= exp2(peak - higher)
            peak = higher
            for i in range(values):
                weight += exp2(v[i] - peak)
        highest = largest(peak, scratch)
        weight = total(weight * exp2(peak - highest), scratch)
        if not counts:  # nothing was read; the gradient below becomes exactly 0
            highest, weight = float32(0), float32(1)
        if cuda.threadIdx.x == 0:
            picked = load_one(z, base + target) * LOG2E - highest if counts else float32(0)
            logp[row] = (picked - log2(weight)) * LN2 if counts else float32(0)
        if differentiates:
            cuda.syncthreads()  # the target's logit is read before a gradient takes its place
            factor = coefficient[row * pitch] if counts else float32(0)
            scale = factor / weight
            for start in range(0, columns, piece):
                for w in range(vectors):
                    at = start + (w * threads + cuda.threadIdx.x) * width
                    load(z, base + at, vocab_size - at if counts else int64(0), v, w * width)
                for w in range(vectors):
                    at = start + (w * threads + cuda.threadIdx.x) * width
                    for i in range(width):
                        j = w * width + i
                        gradient = exp2(v[j] * LOG2E - highest) * scale
                        gradient -= factor if at + i == target else float32(0)
                        v[j] = gradient if counts and at + i < vocab_size else float32(0)
                for w in range(vectors):
                    at = start + (w * threads + cuda.threadIdx.x) * width
                    store(dz, base + at, columns - at, v, w * width)

    fp32 = pointer("float32")
    signature = (pointer(dtype), pointer("int32"), fp32, fp32, pointer(out_dtype), i64, i64, i64)
    return Kernel(cross_entropy, threads, *signature)


def cross_entropy_rows(xp, logits, targets, coefficient, logp, dlogits, *, vocab_size) -> None:
    """Log-probabilities of targets, and the logits' gradient if dlogits is given.

    logits: (R, Vpad) fp32 or bf16.  targets: (R,) int32, negative = ignored: logp 0, gradient 0.
    coefficient: (R,) fp32, or () for all rows, or None without dlogits.  logp: (R,) fp32, written.
    dlogits: (R, Vpad) fp32 or bf16, all of it written; may be logits itself.
    """
    rows, columns = logits.shape
    out = logits if dlogits is None else dlogits
    aligned = are_aligned(columns, logits, out)
    if dlogits is not None and _can_be_held(logits, out, aligned):
        _held_rows(logits, targets, coefficient, logp, out, vocab_size)
        return
    threads = 32
    while threads < MOST_THREADS and threads * VALUES < columns:
        threads *= 2
    kernel = rows_kernel(logits.dtype, out.dtype, aligned, threads, dlogits is not None)
    pitch = _pitch(coefficient)
    kernel(rows, logits, targets, coefficient, logp, dlogits, columns, vocab_size, pitch)


def _pitch(coefficient) -> int:
    """Elements from one row's coefficient to the next."""
    return 0 if coefficient is None or coefficient.ndim == 0 else 1


def _can_be_held(logits, dlogits, aligned: bool) -> bool:
    """Whether the kernel in CUDA C++ takes these rows; it has no form for the simulator."""
    is_bf16 = logits.dtype == dlogits.dtype == bfloat16
    return is_bf16 and aligned and not SIMULATED and logits.shape[1] * 2 <= HELD_BYTES


def _held_rows(logits, targets, coefficient, logp, dlogits, vocab_size: int) -> None:
    rows, columns = logits.shape
    if rows == 0:
        return
    import cupy

    vectors = columns * logits.itemsize // VECTOR_BYTES
    threads = min(-(-vectors // 32) * 32, HELD_THREADS)
    device = cupy.cuda.runtime.getDevice()
    kernel, blocks = _held_kernel(device, vectors, vocab_size, threads)
    arguments = (logits, targets, coefficient, logp, dlogits)
    counts = (np.int32(rows), np.int32(_pitch(coefficient)))
    shared_bytes = vectors * VECTOR_BYTES
    kernel((min(rows, blocks),), (threads,), (*arguments, *counts), shared_mem=shared_bytes)


@functools.cache
def _held_kernel(device: int, vectors: int, vocab_size: int, threads: int):
    """The kernel on a GPU, and how many of its blocks run there at once."""
    import cupy

    defines = (f"WORDS={vectors}", f"VOCAB={vocab_size}", f"THREADS={threads}")
    kernel = nvrtc.function("cross_entropy.cu", "cross_entropy", defines)
    kernel.max_dynamic_shared_size_bytes = vectors * VECTOR_BYTES
    multiprocessors = cupy.cuda.Device(device).attributes["MultiProcessorCount"]
    return kernel, 2 * multiprocessors


def negated_sum(logp, scale, loss, rows):
    scratch = cuda.shared.array(SUM_THREADS, float64)
    total = float64(0)
    for i in range(cuda.threadIdx.x, rows, SUM_THREADS):
        total += float64(logp[i])
    total = sum_of_block(total, scratch)
    if cuda.threadIdx.x == 0:
        loss[0] = -total * float64(scale[0])


_FP32, _FP64 = pointer("float32"), pointer("float64")
NEGATED_SUM = Kernel(negated_sum, SUM_THREADS, _FP32, _FP32, _FP64, i64)


def scaled_loss(xp, logp, scale):
    """-scale sum(logp), () float64, in a fixed order.  logp: (N,) fp32.  scale: () fp32."""
    loss = xp.empty((), "float64")
    NEGATED_SUM(1, logp, scale, loss, logp.size)
    return loss
