"""How the CPU kernels use threads."""

# `prange` loops only: looking for parallelism in array expressions as well costs seconds of
# compilation and would make sums depend on the number of threads.
PRANGE_ONLY = {
    "prange": True,
    "comprehension": False,
    "reduction": False,
    "inplace_binop": False,
    "setitem": False,
    "numpy": False,
    "stencil": False,
    "fusion": False,
}

# Elements below which a kernel runs on the calling thread: waking threads takes 10 to 20 us, as long
# as one core needs for this many elements of a normalization (2-core Xeon, 2026-01).
SERIAL = 65536
