"""Register-blocked matrix tiles: the one place where the CPU kernels name vector registers.

A tile is `ROWS` rows by `LANES` columns of C[i, j] = sum_k A[i, k] * B[k, j]. Its accumulators stay
in registers while k runs; each A[i, k] is broadcast, and two vector loads hold B[k, j : j + LANES].
Numba vectorizes innermost loops only, which would load and store every accumulator once per k, so
the tile is written as LLVM vector instructions (130 to 138 of 166 GFLOP/s on one core of a Xeon
with AVX-512, K = 32). LLVM legalizes them for any machine, and fuses multiply and add where it can.

Arrays are contiguous fp32 of any rank, addressed by element offsets: A[i, k] is at
a_start + i * a_row + k * a_k, and so on. Nothing is bounds-checked. Precision: fp32, k in order.
"""

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FEATURES = llvm.get_host_cpu_features()
_WIDTH = (
    16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") else 4
)  # floats in a register
ROWS = 4 if _WIDTH == 8 else 8  # AVX2 has 16 registers; AVX-512 and NEON have 32
LANES = 2 * _WIDTH  # ROWS * 2 independent accumulators cover the latency of a multiply-add

_INDEX = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), _WIDTH)
_INTEGERS = ir.VectorType(ir.IntType(32), _WIDTH)
_ROUND = (
    12582912.0 + 127
)  # adding 1.5 * 2**23 leaves the nearest integer in the low bits; 127: exponent bias
_EXP2 = (  # minimax polynomial of 2**f on [-0.5, 0.5], lowest order first; relative error 7.5e-8
    1.0000001192092896,
    0.6931469440460205,
    0.24022120237350464,
    0.05550713092088699,
    0.009675541892647743,
    0.0013276472454890609,
)


@intrinsic
def multiply_tile(context, a, a_start, a_row, a_k, b, b_start, b_k, count, c, c_start, c_row):
    """Set a tile of C to A times B over `count` steps of k."""
    signature = types.void(a, a_start, a_row, a_k, b, b_start, b_k, count, c, c_start, c_row)

    def emit(context, builder, signature, args):
        tile = _Tile(context, builder, signature, args)
        for row, column, value in tile.product(*tile.args[:8]):
            tile.store(value, *tile.args[8:], row, column)
        return context.get_dummy_value()

    return signature, emit


@intrinsic
def add_multiply_tile(context, a, a_start, a_row, a_k, b, b_start, b_k, count, c, c_start, c_row):
    """Add A times B over `count` steps of k to a tile of C."""
    signature = types.void(a, a_start, a_row, a_k, b, b_start, b_k, count, c, c_start, c_row)

    def emit(context, builder, signature, args):
        tile = _Tile(context, builder, signature, args)
        for row, column, value in tile.product(*tile.args[:8]):
            total = builder.fadd(value, tile.load(*tile.args[8:], row, column))
            tile.store(total, *tile.args[8:], row, column)
        return context.get_dummy_value()

    return signature, emit


@intrinsic
def exp2_tile(
    context,
    a,
    a_start,
    a_row,
    a_k,
    b,
    b_start,
    b_k,
    count,
    bias,
    bias_start,
    shift,
    start,
    total,
    peak,
    c,
    c_start,
    c_row,
):
    """Set a tile of C to 2**(z - shift), z[i, j] = (A B)[i, j] + bias[i]; shift is by column.

    Also adds the sum of each column of C to `total` and raises `peak` to the column's largest z.
    shift is read at `start`, total and peak at 0. Where the peak ends up 128 or more above the
    shift, C and `total` are meaningless.
    """
    signature = types.void(
        a,
        a_start,
        a_row,
        a_k,
        b,
        b_start,
        b_k,
        count,
        bias,
        bias_start,
        shift,
        start,
        total,
        peak,
        c,
        c_start,
        c_row,
    )

    def emit(context, builder, signature, args):
        tile = _Tile(context, builder, signature, args)
        bias, bias_start, shift, start, total, peak = tile.args[8:14]
        zero = _INDEX(0)
        shifts, totals, peaks = (
            [tile.load(array, at, zero, 0, column) for column in range(2)]
            for array, at in ((shift, start), (total, zero), (peak, zero))
        )
        for row, column, z in tile.product(*tile.args[:8], bias=(bias, bias_start)):
            larger = builder.fcmp_ordered(">", z, peaks[column])
            peaks[column] = builder.select(larger, z, peaks[column])
            power = _exp2(builder, builder.fsub(z, shifts[column]))
            totals[column] = builder.fadd(totals[column], power)
            tile.store(power, *tile.args[14:], row, column)
        for column in range(2):
            tile.store(totals[column], total, zero, zero, 0, column)
            tile.store(peaks[column], peak, zero, zero, 0, column)
        return context.get_dummy_value()

    return signature, emit


class _Tile:
    """Emits the instructions of one intrinsic; `args` are its arguments, pointers and int64."""

    def __init__(self, context, builder, signature, args):
        self.builder = builder
        self.args = []
        for kind, value in zip(signature.args, args, strict=True):
            if isinstance(kind, types.Array):
                data = context.make_array(kind)(context, builder, value).data
                self.args.append(builder.bitcast(data, ir.FloatType().as_pointer()))
            else:
                self.args.append(context.cast(builder, value, kind, types.intp))

    def product(self, a, a_start, a_row, a_k, b, b_start, b_k, count, *, bias=None):
        """(row, column, A B + bias) for the tile's registers, column by column."""
        builder = self.builder
        cells = [(row, column) for row in range(ROWS) for column in range(2)]
        sums = {cell: cgutils.alloca_once(builder, _VECTOR) for cell in cells}
        for (row, _), total in sums.items():
            start = _constant(0.0) if bias is None else self.broadcast(*bias, row, _INDEX(1))
            builder.store(start, total)
        with cgutils.for_range(builder, count, intp=_INDEX) as loop:
            a_here = builder.add(a_start, builder.mul(loop.index, a_k))
            b_here = builder.add(b_start, builder.mul(loop.index, b_k))
            columns = [self.load(b, b_here, _INDEX(0), 0, column) for column in range(2)]
            for row in range(ROWS):
                scalar = self.broadcast(a, a_here, row, a_row)
                for column in range(2):
                    total = sums[row, column]
                    product = builder.fmul(scalar, columns[column], flags=("contract",))
                    builder.store(
                        builder.fadd(builder.load(total), product, flags=("contract",)), total
                    )
        return [(row, column, builder.load(total)) for (row, column), total in sums.items()]

    def broadcast(self, array, start, row, row_stride):
        builder = self.builder
        offset = builder.add(start, builder.mul(row_stride, _INDEX(row)))
        scalar = builder.load(builder.gep(array, [offset]))
        one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.IntType(32)(0))
        lanes = ir.Constant(_INTEGERS, [0] * _WIDTH)
        return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), lanes)

    def address(self, array, start, row_stride, row, column):
        builder = self.builder
        if row:
            start = builder.add(start, builder.mul(row_stride, _INDEX(row)))
        start = builder.add(start, _INDEX(column * _WIDTH))
        return builder.bitcast(builder.gep(array, [start]), _VECTOR.as_pointer())

    def load(self, array, start, row_stride, row, column):
        loaded = self.builder.load(self.address(array, start, row_stride, row, column))
        loaded.align = 4
        return loaded

    def store(self, value, array, start, row_stride, row, column):
        self.builder.store(value, self.address(array, start, row_stride, row, column)).align = 4


def _constant(value):
    return ir.Constant(_VECTOR, [value] * _WIDTH)


def _exp2(builder, t):
    """2**t for t < 128, 0 below -126.5, NaN for NaN; relative error below 3e-7."""
    low = _constant(-127.0)  # whose exponent field is that of 0
    t = builder.select(builder.fcmp_ordered("<", t, low), low, t)
    rounded = builder.fadd(t, _constant(_ROUND))
    fraction = builder.fsub(t, builder.fsub(rounded, _constant(_ROUND)))
    power = _constant(_EXP2[-1])
    for coefficient in _EXP2[-2::-1]:
        product = builder.fmul(power, fraction, flags=("contract",))
        power = builder.fadd(product, _constant(coefficient), flags=("contract",))
    scale = builder.shl(builder.bitcast(rounded, _INTEGERS), ir.Constant(_INTEGERS, [23] * _WIDTH))
    return builder.fmul(power, builder.bitcast(scale, _VECTOR))
