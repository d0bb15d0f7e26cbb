"""Matrix products by cuBLAS, through nvmath-python: CuPy's own cuBLAS refuses stream capture.

    out = alpha op(a) @ op(b) + beta out        op: as stored, or transposed

Row-major views; leading dimensions come from the strides, so slices and transposes are free. fp32
operands give fp32 results without TF32, unless the device asks for it; bf16 operands are summed in
fp32 into bf16 or fp32, so a weight gradient is added to its fp32 buffer with beta = 1.

Each thread has one handle a GPU, on the thread's current stream, with a workspace that never moves:
captured products need that, and with one stream and cuBLAS's default of no atomics the same call
gives the same bits each time. The algorithm is a function of shapes and types: cuBLAS's own choice,
or for large bf16 products one from a committed table (`xtrain.cuda.algorithms`). One chosen by
timing in the run could differ from run to run, and with it the bits.

In Numba's simulator NumPy computes the same, so that what is built on this is tested without a GPU.
"""

import functools
import math
import threading
from typing import NamedTuple

import numpy as np

from xtrain.cuda import algorithms
from xtrain.cuda.compile.launch import SIMULATED
from xtrain.engine import device as devices
from xtrain.engine.dtype import bfloat16, float32

WORKSPACE_BYTES = 32 << 20  # what cuBLAS recommends for Hopper; enough for every other GPU
CUDA_TYPES = {float32: 0, bfloat16: 14}  # CUDA_R_32F, CUDA_R_16BF
DEFAULT_ALGORITHM = -1  # CUBLAS_GEMM_DEFAULT


class _Handles(threading.local):
    """This thread's handles, by number of the GPU."""

    def __init__(self):
        self.of_gpu: dict[int, _Handle] = {}


_handles = _Handles()


def gemm(a, b, out, *, transpose_a=False, transpose_b=False, alpha=1.0, beta=0.0) -> None:
    """out = alpha op(a) @ op(b) + beta out; a, b (fp32 or bf16, alike) are not changed.

    All are 2-D, or contiguous with more axes: then the leading ones count as one.
    """
    if out.size == 0:
        return
    if a.size == 0:  # a sum of no terms
        out[...] = out * beta if beta else 0
        return
    if SIMULATED:
        a, b, out = (
            array.reshape(-1, array.shape[-1]) if array.ndim > 2 else array for array in (a, b, out)
        )
        _simulate(a, b, out, transpose_a, transpose_b, alpha, beta)
        return
    call = _call(a, b, out, transpose_a, transpose_b, alpha, beta, batched=False)
    algorithm = None if call.key is None else _algorithms(_device()).get(call.key)
    if algorithm is None:
        by_cublas(call, a, b, out)
    else:
        by_algorithm(call, algorithm, a, b, out)


def by_cublas(call: "_Call", a, b, out) -> None:
    """Queue a product by the algorithm that cuBLAS chooses."""
    cublas, handle = _handle()
    cublas.gemm_ex(
        handle,
        *call.sizes,
        b.data.ptr,
        *call.second,
        a.data.ptr,
        *call.first,
        out.data.ptr,
        *call.target,
    )


def by_algorithm(call: "_Call", algorithm: bytes, a, b, out) -> None:
    """Queue a product by an algorithm of cuBLASLt."""
    _, handle = _handle()
    held = _handles.of_gpu[_device()]
    addresses = b.data.ptr, a.data.ptr, out.data.ptr
    scalars, workspace = (call.sizes[5], call.first[2]), (held.workspace.ptr, WORKSPACE_BYTES)
    _product(call).run(handle, _address(algorithm), addresses, scalars, workspace, held.stream)


def candidates(call: "_Call", count: int) -> list[bytes]:
    """Algorithms of cuBLASLt for a product, those first that it takes for the fastest."""
    return _product(call).candidates(_handle()[1], count, WORKSPACE_BYTES)


def gemm_batched(a, b, out, *, transpose_a=False, transpose_b=False, alpha=1.0, beta=0.0) -> None:
    """out[n] = alpha op(a[n]) @ op(b[n]) + beta out[n], all 3-D with one batch size, one launch."""
    if out.size == 0:
        return
    if SIMULATED:
        _simulate(a, b, out, transpose_a, transpose_b, alpha, beta)
        return
    cublas, handle = _handle()
    call = _call(a, b, out, transpose_a, transpose_b, alpha, beta, batched=True)
    cublas.gemm_strided_batched_ex(
        handle,
        *call.sizes,
        b.data.ptr,
        *call.second,
        a.data.ptr,
        *call.first,
        out.data.ptr,
        *call.target,
    )


def as_operand(xp, array):
    """The array, or a contiguous copy when neither its rows nor its columns are contiguous."""
    rows, columns = array.shape[-2:]
    size = array.itemsize
    down, across = array.strides[-2:]
    by_rows = across == size and down >= columns * size
    by_columns = down == size and across >= rows * size
    return array if by_rows or by_columns else xp.ascontiguousarray(array)


class Layout(NamedTuple):
    """All of an array that decides how its product is asked for, but the address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def as_matrix(self) -> "Layout":
        """The leading axes, of a contiguous array if they are several, taken for one."""
        if len(self.shape) == 2:
            return self
        *leading, columns = self.shape
        row = columns * self.itemsize
        expected = row * math.prod(leading)
        for size, stride in zip(self.shape, self.strides, strict=True):
            expected //= max(size, 1)
            assert size == 1 or stride == expected, f"{self.shape} with strides {self.strides}"
        return Layout((math.prod(leading), columns), (row, self.itemsize), self.dtype)


class Arrangement:
    """How cuBLAS is told of one row-major operand, whose transpose it sees, being column-major.

    operation: 1 when the operand enters the product transposed, else 0.  leading: elements from one
    stored row to the next.  batch_stride: elements from one matrix to the next, 0 in 2-D.  type:
    cuBLAS's number of the dtype.  array: an array or its `Layout`.
    """

    def __init__(self, array, transpose: bool):
        rows, columns = array.shape[-2:]
        down, across = (stride // array.itemsize for stride in array.strides[-2:])
        if (across == 1 or columns == 1) and (rows == 1 or down >= columns):
            self.operation, self.leading = int(transpose), columns if rows == 1 else down
        elif (down == 1 or rows == 1) and (columns == 1 or across >= rows):
            self.operation, self.leading = int(not transpose), rows if columns == 1 else across
        else:
            raise ValueError(
                f"gemm: neither rows nor columns of {array.shape} with strides {array.strides} "
                "are contiguous"
            )
        self.batch_stride = array.strides[0] // array.itemsize if len(array.shape) == 3 else 0
        self.dtype = array.dtype

    @property
    def type(self) -> int:
        return CUDA_TYPES[self.dtype]


class _Call(NamedTuple):
    """What a call of cuBLAS is given but for addresses of arrays, in the order it takes them.

    sizes: operations of the second operand and the first, columns, rows, inner size, alpha.
    first, second, target: type and leading dimension of an operand, batched also the stride of its
    batch; then after the first operand beta, after the result how many, compute type, algorithm.
    key: what `xtrain.cuda.algorithms` calls the product; None when it is none of its products.
    """

    sizes: tuple[int, ...]
    second: tuple[int, ...]
    first: tuple[int, ...]
    target: tuple[int, ...]
    key: str | None


def call_of(a, b, out, *, transpose_a=False, transpose_b=False, beta=0.0) -> "_Call":
    """How the libraries are asked for a product."""
    return _call(a, b, out, transpose_a, transpose_b, 1.0, beta, batched=False)


def _call(a, b, out, transpose_a, transpose_b, alpha, beta, *, batched: bool) -> _Call:
    operands = (a.shape, a.strides, a.dtype, b.shape, b.strides, b.dtype)
    how = (transpose_a, transpose_b, alpha, beta, devices.current().tf32, batched)
    return _described(*operands, out.shape, out.strides, out.dtype, *how)


@functools.lru_cache(maxsize=4096)  # an eager step asks for the same few products again and again
def _described(*described) -> _Call:
    (*operands, transpose_a, transpose_b, alpha, beta, tf32, batched) = described
    a, b, out = (Layout(*operands[i : i + 3]) for i in (0, 3, 6))
    if not batched:
        a, b, out = (each.as_matrix() for each in (a, b, out))
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    rows, columns, inner = _sizes(a, b, out, transpose_a, transpose_b)
    first, second = Arrangement(a, transpose_a), Arrangement(b, transpose_b)
    target = Arrangement(out, False)
    assert target.operation == 0, f"rows of the result must be contiguous, strides {out.strides}"
    stored = ((each.type, each.leading, each.batch_stride) for each in (second, first, target))
    second_place, first_place, target_place = (p if batched else p[:2] for p in stored)
    count = (out.shape[0],) if batched else ()
    sizes = (second.operation, first.operation, columns, rows, inner, _scalar(alpha))
    end = (*count, _compute_type(a.dtype == float32, tf32), DEFAULT_ALGORITHM)
    key = None
    if not batched and a.dtype == bfloat16:
        flags = {"transpose_a": bool(first.operation), "transpose_b": bool(second.operation)}
        flags |= {"out_type": target.type, "adds": beta != 0}
        key = algorithms.key((rows, columns, inner), **flags)
    return _Call(sizes, second_place, (*first_place, _scalar(beta)), (*target_place, *end), key)


@functools.cache
def _algorithms(device: int) -> dict[str, bytes]:
    """The table's algorithms for a GPU."""
    from nvmath.bindings import cublasLt

    name = _bindings()[0].cuda.runtime.getDeviceProperties(device)["name"].decode()
    return algorithms.table(name, cublasLt.get_version())


@functools.lru_cache(maxsize=4096)
def _product(call: _Call) -> algorithms.Product:
    from nvmath.bindings import cublasLt

    return described_product(call, cublasLt)


def described_product(call: _Call, lt) -> algorithms.Product:
    """A product as cuBLASLt (lt: its bindings) is told of it."""
    transpose_second, transpose_first, columns, rows, inner, _ = call.sizes
    second = (inner, columns) if transpose_second else (columns, inner)
    first = (rows, inner) if transpose_first else (inner, rows)
    places = (call.second[0], *second, call.second[1]), (call.first[0], *first, call.first[1])
    target = (call.target[0], columns, rows, call.target[1])
    flags = {"transpose_second": transpose_second, "transpose_first": transpose_first}
    return algorithms.Product(lt, *places, target, **flags)


@functools.cache
def _held_algorithm(algorithm: bytes) -> np.ndarray:
    return np.frombuffer(algorithm, np.uint8)


def _address(algorithm: bytes) -> int:
    """Where cuBLASLt reads an algorithm, there for good."""
    return _held_algorithm(algorithm).ctypes.data


def _sizes(a, b, out, transpose_a, transpose_b) -> tuple[int, int, int]:
    """Rows, columns and inner size of the product."""
    rows, inner = a.shape[-2:] if not transpose_a else a.shape[:-3:-1]
    again, columns = b.shape[-2:] if not transpose_b else b.shape[:-3:-1]
    shapes = (a.shape, b.shape, out.shape, transpose_a, transpose_b)
    assert inner == again and out.shape[-2:] == (rows, columns), shapes
    assert a.shape[:-2] == b.shape[:-2] == out.shape[:-2], shapes
    return rows, columns, inner


@functools.cache
def _host_scalar(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def _scalar(value: float) -> int:
    """The address of an fp32 host scalar, there for good; cuBLAS reads it during the call."""
    return _host_scalar(float(value)).ctypes.data


def _compute_type(is_fp32: bool, tf32: bool) -> int:
    """As a plain integer, which costs each call a microsecond less than the enumeration's."""
    _, cublas = _bindings()
    rounding = "_FAST_TF32" if tf32 else "_PEDANTIC"
    return int(cublas.ComputeType["COMPUTE_32F" + (rounding if is_fp32 else "")])


class _Handle:
    """A cuBLAS handle of one GPU, and its workspace, which is taken from no pool."""

    def __init__(self, cupy, cublas):
        self.workspace = cupy.cuda.memory.Memory(WORKSPACE_BYTES)
        self.pointer = cublas.create()
        self.stream = None

    def use_stream(self, cublas, stream: int) -> None:
        if stream != self.stream:
            cublas.set_stream(self.pointer, stream)
            # Setting the stream takes the workspace away again.
            cublas.set_workspace(self.pointer, self.workspace.ptr, WORKSPACE_BYTES)
            self.stream = stream


@functools.cache  # importing from a package takes a microsecond, and every product asks
def _bindings() -> tuple:
    import cupy
    from nvmath.bindings import cublas

    return cupy, cublas


def _device() -> int:
    """The number of the current GPU."""
    return _bindings()[0].cuda.runtime.getDevice()


def _handle():
    """The bindings, and this thread's handle of the current GPU set to the current stream."""
    cupy, cublas = _bindings()
    number = _device()
    handle = _handles.of_gpu.get(number)
    if handle is None:
        handle = _handles.of_gpu[number] = _Handle(cupy, cublas)
    handle.use_stream(cublas, cupy.cuda.get_current_stream().ptr)
    return cublas, handle.pointer


def _simulate(a, b, out, transpose_a, transpose_b, alpha, beta) -> None:
    _sizes(a, b, out, transpose_a, transpose_b)
    left, right = a.astype(np.float32), b.astype(np.float32)
    left = left.swapaxes(-1, -2) if transpose_a else left
    right = right.swapaxes(-1, -2) if transpose_b else right
    product = np.float32(alpha) * np.matmul(left, right)
    if beta:
        product = product + np.float32(beta) * out.astype(np.float32)
    out[...] = product.astype(out.dtype)
