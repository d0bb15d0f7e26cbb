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
