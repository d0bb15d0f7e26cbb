"""Instructions that Numba has no name for, as LLVM: 16-byte access, bit casts, bf16 rounding.

Only imported where Numba compiles for a GPU; `vectors.py` has each one's simulator form.
"""

from llvmlite import ir
from numba import types

try:
    from numba.cuda.extending import intrinsic  # numba-cuda
except ImportError:  # numba's own target, which never launches here
    from numba.extending import intrinsic

_INT32 = ir.IntType(32)
_FLOAT = ir.FloatType()


def _vector_access(count: int):
    """Intrinsics that read and write `count` uint32 in one instruction."""
    vector = ir.VectorType(_INT32, count)
    several = types.UniTuple(types.uint32, count)

    def address(context, builder, array, start, index_type):
        index = context.cast(builder, start, index_type, types.int64)
        return builder.bitcast(builder.gep(array, [index]), vector.as_pointer())

    @intrinsic
    def load(typing_context, array, start):
        def emit(context, builder, signature, args):
            loaded = builder.load(address(context, builder, *args, signature.args[1]))
            loaded.align = 4 * count
            parts = [builder.extract_element(loaded, _INT32(i)) for i in range(count)]
            return context.make_tuple(builder, several, parts)

        return several(array, start), emit

    @intrinsic
    def store(typing_context, array, start, values):
        def emit(context, builder, signature, args):
            stored = ir.Constant(vector, ir.Undefined)
            for i in range(count):
                part = builder.extract_value(args[2], i)
                stored = builder.insert_element(stored, part, _INT32(i))
            target = address(context, builder, args[0], args[1], signature.args[1])
            builder.store(stored, target).align = 4 * count
            return context.get_dummy_value()

        return types.void(array, start, several), emit

    return load, store


# load(array, start): the uint32 that begin at element `start`, as a tuple; start must be aligned.
# store(array, start, values): the reverse.
load_four, store_four = _vector_access(4)
load_two, store_two = _vector_access(2)


@intrinsic
def bits_of(typing_context, x):
    """The 32 bits of an fp32 number."""

    def emit(context, builder, signature, args):
        return builder.bitcast(args[0], _INT32)

    return types.uint32(types.float32), emit


@intrinsic
def float_of(typing_context, bits):
    """The fp32 number of 32 bits."""

    def emit(context, builder, signature, args):
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.uint32), emit


@intrinsic
def pack(typing_context, low, high):
    """Two fp32 numbers rounded to bf16, in one uint32, the first in the low half."""

    def emit(context, builder, signature, args):
        kind = ir.FunctionType(_INT32, [_FLOAT, _FLOAT])
        code = ir.InlineAsm(kind, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", side_effect=False)
        return builder.call(code, [args[1], args[0]])

    return types.uint32(types.float32, types.float32), emit
