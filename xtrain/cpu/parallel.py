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

# Elements up to which a kernel stays on the calling thread: waking the others takes 10 to 20 us on an
# idle machine and far longer on a busy one, and a core normalizes this many in about 30.
SERIAL = 65536
