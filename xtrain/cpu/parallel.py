"""How the CPU kernels use threads."""

from numba.core.cpu_options import ParallelOptions

# `prange` loops only: looking for parallelism in array expressions as well costs seconds of
# compilation, and starts threads where a kernel means not to. An object, because Numba empties a
# dict of options when it compiles the first function that was given it.
PRANGE_ONLY = ParallelOptions(
    {
        "comprehension": False,
        "reduction": False,
        "inplace_binop": False,
        "setitem": False,
        "numpy": False,
        "stencil": False,
        "fusion": False,
    }
)

# Elements up to which a kernel stays on the calling thread: waking the others takes 10 to 20 us on
# an idle machine and far longer on a busy one, and a core normalizes this many in about 30.
SERIAL = 65536
