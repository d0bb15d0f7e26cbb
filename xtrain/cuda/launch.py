"""The one place that compiles and launches a Numba kernel.

A kernel has a fixed signature of pointers and scalars. Numba compiles it to PTX (no driver needed),
nvJitLink to a cubin, and CuPy loads and launches that on its current stream with the arrays' bare
addresses. Numba's own launch takes 33 to 90 us a kernel, CuPy's 6 us (H200 host), and Numba never
opens a context or synchronises on arrays that it is handed, which capture forbids.

With NUMBA_ENABLE_CUDASIM=1 the same kernels run in Numba's simulator on NumPy arrays. It runs one
thread per CUDA thread in Python: samples must be tiny, and it proves indexing and algebra, not
fp32 rounding.

Rules that a kernel must obey for both forms: it calls the module by the name `cuda`, device
functions use `block.thread_index` instead of `cuda`, one `cuda.shared.array` a source line, and
sizes of local and shared arrays are plain names of the enclosing scope.
"""

import functools
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
from numba import config, cuda, types

from xtrain.cuda import cubins
from xtrain.errors import UsageError

SIMULATED = bool(config.ENABLE_CUDASIM)

i32, i64, u32, f32, f64 = types.int32, types.int64, types.uint32, types.float32, types.float64
_SCALARS = {i32: np.int32, i64: np.int64, u32: np.uint32, f32: np.float32, f64: np.float64}
_NULL = np.uint64(0)
_loading = threading.RLock()  # several threads, one a GPU, may meet a kernel for the first time


def pointer(dtype) -> types.CPointer:
    """The kernel's view of a contiguous array: elements of its dtype, bf16 as its 16 bits."""
    return types.CPointer(getattr(types, storage_name(dtype)))


@functools.cache
def storage_name(dtype) -> str:
    """`float32` for float32, `uint16` for bfloat16, ...: what a kernel sees of a dtype."""
    name = np.dtype(dtype).name
    return "uint16" if name == "bfloat16" else name


def device_function(fn: Callable) -> Callable:
    """A function that kernels call; in the simulator it is the plain function itself."""
    return fn if SIMULATED else cuda.jit(device=True)(fn)


class Kernel:
    """A compiled-on-demand kernel: `kernel(grid, *args)` launches it.

    block: threads a block, always as many; the compiler gives each thread its share of registers.
    signature: numba types, `pointer(dtype)` for arrays. Every array must be C-contiguous and of
    the pointer's dtype; None is a null pointer that the kernel must not read.
    """

    def __init__(self, fn: Callable, block: int, *signature):
        self.fn = fn
        self.name = f"xtrain_{fn.__name__}"
        self.block = block
        self.signature = signature
        # Asked at every launch, and Numba's types take long to hash: looked up once.
        self._scalars = [_SCALARS.get(kind) for kind in signature]
        self._stored = [getattr(kind, "dtype", kind).name for kind in signature]
        self._functions: dict[int, object] = {}  # by device number

    def __call__(self, grid: int, *args) -> None:
        """Launch `grid` blocks on the current stream."""
        if grid == 0:
            return
        if SIMULATED:
            _simulate(self, grid, args)
            return
        import cupy

        number = cupy.cuda.runtime.getDevice()
        function = self._functions.get(number)
        if function is None:
            function = self._functions[number] = self._load(cupy)
        function((grid,), (self.block,), self._packed(args))

    def ptx(self, capability: tuple[int, int]) -> str:
        """PTX for a compute capability such as (9, 0); needs numba-cuda, but no driver."""
        if not hasattr(cuda, "compile"):
            raise UsageError("numba-cuda is not installed: kernels cannot be compiled")
        signature = types.void(*self.signature)
        with _loading, _compiling_for(capability):
            text, _ = cuda.compile(
                self.fn,
                signature,
                device=False,
                abi="numba",
                cc=capability,
                launch_bounds=self.block,
            )
        mangled = re.search(r"\.visible \.entry (\w+)\(", text).group(1)
        return text.replace(mangled, self.name)

    def cubin(self, capability: tuple[int, int]) -> bytes:
        """Machine code for a compute capability; needs numba-cuda's wheels, but no driver."""
        from cuda.core import Linker, LinkerOptions, ObjectCode

        code = ObjectCode.from_ptx(self.ptx(capability).encode(), name=self.name)
        options = LinkerOptions(arch=f"sm_{capability[0]}{capability[1]}")
        return Linker(code, options=options).link("cubin").code

    def machine_code(self, capability: tuple[int, int]) -> bytes:
        """The cubin from disk, or compiled: in a thread of its own, so that no caller is held.

        Numba's compiler leaves exceptions behind, in cycles, whose tracebacks hold the frames of
        its callers until the garbage collector comes by. In the thread of a step those frames hold
        the step's arrays: a first step would take twice its memory.
        """

        def kept() -> bytes:
            with _loading:
                return cubins.kept(self, capability)

        with ThreadPoolExecutor(max_workers=1) as compiler:
            return compiler.submit(kept).result()

    def _packed(self, args) -> list:
        """Arguments as CuPy packs them: arrays by address, scalars in the signature's type."""
        packed = []
        for scalar, stored, arg in zip(self._scalars, self._stored, args, strict=True):
            if scalar is not None:
                packed.append(scalar(arg))
            elif arg is None:
                packed.append(_NULL)
            else:
                assert _fits(stored, arg), (stored, arg.dtype, arg.shape, arg.strides)
                packed.append(arg)
        return packed

    def _load(self, cupy):
        capability = tuple(map(int, re.fullmatch(r"(\d+)(\d)", _capability(cupy)).groups()))
        machine_code = self.machine_code(capability)
        module = cupy.cuda.function.Module()
        module.load(machine_code)
        return module.get_function(self.name)


def _capability(cupy) -> str:
    return cupy.cuda.Device().compute_capability


def _fits(stored: str, array) -> bool:
    return array.flags.c_contiguous and storage_name(array.dtype) == stored


@contextmanager
def _compiling_for(capability: tuple[int, int]):
    """Tell Numba what device functions are compiled for; it asks the driver otherwise."""
    from numba.cuda import dispatcher

    asks_the_driver = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = asks_the_driver


def _simulate(kernel, grid, args) -> None:
    from xtrain.cuda import simulator

    simulated = []
    for kind, arg in zip(kernel.signature, args, strict=True):
        if kind in _SCALARS:
            simulated.append(_SCALARS[kind](arg))
            continue
        assert arg is None or _fits(kind.dtype.name, arg), (kind, arg.dtype, arg.shape)
        simulated.append(None if arg is None else arg.reshape(-1).view(kind.dtype.name))
    simulator.run(kernel.fn, grid, kernel.block, simulated)
