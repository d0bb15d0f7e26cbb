"""A step captured as one CUDA graph: two eager calls, one capture, replays from then on.

The eager calls are real: they train. They compile and load every kernel and fill the step's own
memory pool, so that capture, which runs nothing, asks the driver for nothing. Each replay reads and
writes the addresses of the capture, so inputs must stay where they are; a replay checks that they
do and names the one that moved.
"""

import contextlib
import gc
from collections.abc import Callable

import cupy

from xtrain.cuda.memory import Pool, account

WARM_UP_CALLS = 2


class CapturedStep:
    """A callable that behaves as `step` does, at the host cost of one launch.

    step: takes nothing, returns an array or a tuple of arrays, obeys the rules of capturable steps.
    inputs: gives the arrays that the step reads by name, or None to check nothing.
    The returned arrays are the same ones in every call, overwritten by the next.
    """

    def __init__(self, step: Callable, stream, inputs: Callable[[], dict] | None = None):
        self._step, self._stream, self._inputs = step, stream, inputs
        self._pool = Pool(account())
        self._calls = 0
        self._outputs: tuple | None = None
        self._several = False
        self._graph = None
        self._captured_with: dict[str, tuple] = {}

    def __call__(self):
        if self._graph is None and self._calls >= WARM_UP_CALLS:
            self._capture()
        if self._graph is None:
            self._run_eagerly()
        else:
            self._require_same_inputs()
            self._graph.launch(self._stream)
        self._calls += 1
        return self._outputs if self._several else self._outputs[0]

    @property
    def is_captured(self) -> bool:
        """Whether the next call is a replay."""
        return self._graph is not None

    @property
    def bytes_to_host(self) -> int:
        """Bytes that each replay copies to the host by itself; 0 before the capture."""
        if self._graph is None:
            return 0
        from xtrain.cuda.traffic import bytes_to_host

        return bytes_to_host(self._graph)

    def _run_eagerly(self) -> None:
        with cupy.cuda.using_allocator(self._pool.allocate):
            results = self._results()
        if self._outputs is None:
            # From the common pool: callers may keep them longer than this step lives.
            self._outputs = tuple(cupy.empty_like(result) for result in results)
        self._publish(results)

    def _results(self) -> tuple:
        results = self._step()
        self._several = isinstance(results, tuple)
        return results if self._several else (results,)

    def _publish(self, results: tuple) -> None:
        for output, result in zip(self._outputs, results, strict=True):
            output[...] = result

    def _capture(self) -> None:
        self._stream.synchronize()
        with _no_garbage_collection(), cupy.cuda.using_allocator(self._pool.allocate):
            self._stream.begin_capture()
            try:
                self._publish(self._results())
            except BaseException:
                self._abandon_capture()
                raise
            self._graph = self._stream.end_capture()
        self._captured_with = self._identities()
        self._graph.upload(self._stream)

    def _abandon_capture(self) -> None:
        """Leave capture mode, so that the stream works again; the step's own error is the news."""
        with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
            self._stream.end_capture()  # it says that what was captured is invalid

    def _identities(self) -> dict[str, tuple]:
        arrays = {} if self._inputs is None else self._inputs()
        return {name: (a.shape, a.dtype, a.data.ptr) for name, a in arrays.items()}

    def _require_same_inputs(self) -> None:
        now = self._identities()
        if now == self._captured_with:
            return
        for name in self._captured_with.keys() | now.keys():
            before, after = self._captured_with.get(name), now.get(name)
            if before != after:
                raise ValueError(
                    f"captured step: {name} was {_described(before)} when the step was captured "
                    f"and is {_described(after)} now; make a new step for it"
                )


def _described(identity: tuple | None) -> str:
    if identity is None:
        return "absent"
    shape, dtype, address = identity
    return f"{dtype} {shape} at {address:#x}"


@contextlib.contextmanager
def _no_garbage_collection():
    """Nothing is destroyed by chance in the middle of a capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
