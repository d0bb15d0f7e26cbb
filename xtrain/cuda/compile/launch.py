"""The one place that compiles and launches a Numba kernel.

A kernel has a fixed signature of pointers and scalars. Numba compiles it to PTX (no driver needed),
nvJitLink to a cubin, and CuPy loads it. A launch packs addresses and scalars as the kernel lays
them out and calls the driver: 4 us on an H200's host, where CuPy's own launch takes 6.5 and Numba's
33 to 90. Numba never opens a context or synchronises on arrays that it is handed, which capture
forbids.

With NUMBA_ENABLE_CUDASIM=1 the same kernels run in Numba's simulator on NumPy arrays. It runs one
thread per CUDA thread in Python: samples must be tiny, and it proves indexing and algebra, not
fp32 rounding.

Rules that a kernel must obey for both forms: it calls the module by the name `cuda`, device
functions use `block.thread_index` instead of `cuda`, one `cuda.shared.array` a source line, and
sizes of local and shared arrays are plain names of the enclosing scope.
"""

import ctypes
import functools
import re
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
from numba import config, cuda, types

from xtrain.cuda.compile import cubins
from xtrain.errors import UsageError

SIMULATED = bool(config.ENABLE_CUDASIM)

i32, i64, u32, f32, f64 = types.int32, types.int64, types.uint32, types.float32, types.float64
_SCALARS = {i32: np.int32, i64: np.int64, u32: np.uint32, f32: np.float32, f64: np.float64}
# As `struct` names the types; its native alignment is that of a kernel's parameters.
_FORMATS = {i32: "i", i64: "q", u32: "I", f32: "f", f64: "d"}
_MOST_BYTES = 4096  # of a kernel's parameters, on every architecture that compiles here
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
    resident: blocks that a multiprocessor should hold at once, which limits those; 0: no wish.
    signature: numba types, `pointer(dtype)` for arrays. Every array must be C-contiguous and of
    the pointer's dtype; None is a null pointer that the kernel must not read.
    """

    def __init__(self, fn: Callable, block: int, *signature, resident: int = 0):
        self.fn = fn
        self.name = f"xtrain_{fn.__name__}"
        self.block = block
        self.resident = resident
        self.signature = signature
        self._layout = struct.Struct("".join(_FORMATS.get(kind, "P") for kind in signature))
        self._arrays = [(i, k.dtype.name) for i, k in enumerate(signature) if k not in _FORMATS]
        self._functions: dict[int, object] = {}  # by device number

    def __call__(self, grid: int, *args) -> None:
        """Launch `grid` blocks on the current stream."""
        if grid == 0:
            return
        if SIMULATED:
            _simulate(self, grid, args)
            return
        cuda_api = _cuda_api()
        number = cuda_api.runtime.getDevice()
        function = self._functions.get(number)
        if function is None:
            function = self._functions[number] = self._load()
        arguments = list(args)
        for i, stored in self._arrays:
            array = arguments[i]
            if array is None:
                arguments[i] = 0
            else:
                # CuPy's `flags` would take half a microsecond.
                fits = array._c_contiguous and storage_name(array.dtype) == stored
                assert fits, (stored, array.dtype, array.shape, array.strides)
                arguments[i] = array.data.ptr
        self._layout.pack_into(_packed.buffer, 0, *arguments)
        _packed.size.value = self._layout.size
        stream = cuda_api.get_current_stream().ptr
        cuda_api.driver.launchKernel(
            function.ptr, grid, 1, 1, self.block, 1, 1, 0, stream, 0, _packed.address
        )

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
                launch_bounds=(self.block, self.resident) if self.resident else self.block,
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

    def _load(self):
        cuda_api = _cuda_api()
        found = cuda_api.Device().compute_capability
        capability = tuple(map(int, re.fullmatch(r"(\d+)(\d)", found).groups()))
        module = cuda_api.function.Module()
        module.load(self.machine_code(capability))
        return module.get_function(self.name)


class _Packed(threading.local):
    """This thread's room for a kernel's parameters, and how the driver is told where they are."""

    def __init__(self):
        self.buffer = ctypes.create_string_buffer(_MOST_BYTES)
        self.size = ctypes.c_size_t()
        at, size = ctypes.addressof(self.buffer), ctypes.addressof(self.size)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
        self._described = (ctypes.c_void_p * 5)(1, at, 2, size, 0)
        self.address = ctypes.addressof(self._described)


_packed = _Packed()


@functools.cache  # an import statement would cost every launch
def _cuda_api():
    import cupy

    return cupy.cuda


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
    from xtrain.cuda.compile import simulator

    simulated = []
    for kind, arg in zip(kernel.signature, args, strict=True):
        if kind in _SCALARS:
            simulated.append(_SCALARS[kind](arg))
            continue
        if arg is not None:
            stored = storage_name(arg.dtype)
            assert arg.flags.c_contiguous and stored == kind.dtype.name, (
                kind,
                arg.dtype,
                arg.shape,
            )
        simulated.append(None if arg is None else arg.reshape(-1).view(kind.dtype.name))
    simulator.run(kernel.fn, grid, kernel.block, simulated)
