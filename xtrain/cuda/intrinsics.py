"""Instructions that Numba has no name for, as LLVM: 16-byte access, bit casts, bf16 rounding.

Only imported where Numba compiles for a GPU; `words.py` has each one's simulator form.
"""

from llvmlite import ir
from numba import types

try:
    from numba.cuda.extending import intrinsic  # numba-cuda
except ImportError:  # numba's own target, which never launches here
    from numba.extending import intrinsic

_INT32 = ir.IntType(32)
_FLOAT = ir.FloatType()
_WORD = ir.VectorType(_INT32, 4)
_FOUR = types.UniTuple(types.uint32, 4)


def _address(context, builder, array, start, index_type):
    index = context.cast(builder, start, index_type, types.int64)
    return builder.bitcast(builder.gep(array, [index]), _WORD.as_pointer())


@intrinsic
def load_word(typing_context, array, start):
    """The four uint32 that begin at element `start` (a multiple of a word) of an array."""

    def emit(context, builder, signature, args):
        word = builder.load(_address(context, builder, *args, signature.args[1]))
        word.align = 16
        parts = [builder.extract_element(word, _INT32(i)) for i in range(4)]
        return context.make_tuple(builder, _FOUR, parts)

    return _FOUR(array, start), emit


@intrinsic
def store_word(typing_context, array, start, a, b, c, d):
    """Write four uint32 from element `start` (a multiple of a word) on."""
    u32 = types.uint32

    def emit(context, builder, signature, args):
        word = ir.Constant(_WORD, ir.Undefined)
        for i, part in enumerate(args[2:]):
            word = builder.insert_element(word, part, _INT32(i))
        target = _address(context, builder, args[0], args[1], signature.args[1])
        builder.store(word, target).align = 16
        return context.get_dummy_value()

    return types.void(array, start, u32, u32, u32, u32), emit


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
