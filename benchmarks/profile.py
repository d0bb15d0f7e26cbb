"""Where a training step's time goes: by op class against its floor, and by kernel.

Op classes: one eager step, each op's forward and backward between two CUDA events. At sizes where a
step is worth profiling the host runs ahead of the GPU, so what lies between the events is GPU time.
What no op accounts for (norm gains added to their buffers, residual sums, the optimizer's scalars)
is the row `other`. Kernels: PyTorch's profiler, where it is installed, sees every kernel of the
process; it watches a captured step, which also gives the gaps between kernels.
"""

import collections
import json
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import floor
from benchmarks.result import Result, versions
from benchmarks.train_step import device_name
from xtrain.assemble.sized_step import SizedStep, Work, load_config
from xtrain.engine import device as devices
from xtrain.engine.op import OPS, Implementation

KERNELS_SHOWN = 25


@dataclass
class Record:
    """One run of an op: its events, products and bytes."""

    name: str
    direction: str
    started: object
    ended: object
    flop: float
    bytes_moved: float

    def milliseconds(self, cupy) -> float:
        return cupy.cuda.get_elapsed_time(self.started, self.ended)


def profile_step(work: Work, *, show: bool) -> list[Result]:
    """Profile a step on the GPU; prints two tables when `show`. One result an op class."""
    device = devices.use("cuda")
    rates = floor.measured_rates(device, work.precision)
    step = SizedStep(load_config(work.model, work.seq), work, device)
    eager_ms, records = _by_op(step, device)
    rows = _op_rows(records, eager_ms, device.xp, rates)
    device.restart_peak()  # the captured step has a pool of its own: there is no room for two
    for _ in range(4):
        step()
    device.synchronize()
    captured_ms = _captured_ms(step, device)
    kernels = _by_kernel(step, device)
    if show:
        _print_ops(rows, eager_ms, captured_ms)
        _print_kernels(kernels, captured_ms)
    return [
        Result(
            name=f"profile/{row['op']}/{row['direction']}",
            work={"model": work.model, "batch": work.batch, "seq": work.seq},
            device=device_name(device),
            unit="ms",
            ours=row["ms"],
            floor=row["floor_ms"],
            versions=versions(),
            detail={"count": row["count"], "step_ms": captured_ms},
        )
        for row in rows
    ] + [
        Result(
            name=f"profile/kernel/{name}",
            work={"model": work.model, "batch": work.batch, "seq": work.seq},
            device=device_name(device),
            unit="ms",
            ours=ms,
            floor=None,
            versions=versions(),
            detail={"count": count},
        )
        for name, (count, ms) in kernels
    ]


def _by_op(step: SizedStep, device) -> tuple[float, list[Record]]:
    """Milliseconds of one eager step, and the records of its ops; two steps warm up."""
    run = step.step.run
    step.step.run = step.step._run
    records: list[Record] = []
    try:
        for _ in range(2):
            step()
        with _recorded(records, device.xp):
            started, ended = _event(device.xp), _event(device.xp)
            started.record()
            step()
            ended.record()
            device.synchronize()
    finally:
        step.step.run = run
    return device.xp.cuda.get_elapsed_time(started, ended), records


@contextmanager
def _recorded(records: list[Record], cupy):
    """Every op's implementation appends to `records` while this is open."""
    before = {name: (op.reference, dict(op.fused)) for name, op in OPS.items()}
    for name, op in OPS.items():
        op.reference = _timed(name, op.reference, records, cupy)
        op.fused = {k: _timed(name, i, records, cupy) for k, i in op.fused.items()}
    try:
        yield
    finally:
        for name, op in OPS.items():
            op.reference, op.fused = before[name]


def _timed(name: str, made: Implementation, records: list[Record], cupy) -> Implementation:
    def forward(xp, *arrays, **attrs):
        started = _event(cupy)
        started.record()
        y, saved = made.forward(xp, *arrays, **attrs)
        ended = _event(cupy)
        ended.record()
        flop = floor.op_flop(OPS[name], arrays, attrs, "forward")
        moved = floor.op_bytes(OPS[name], arrays, y)
        records.append(Record(name, "forward", started, ended, flop, moved))
        return y, (arrays, saved)

    def backward(xp, dy, saved, **options):
        arrays, inner = saved
        started = _event(cupy)
        started.record()
        gradients = made.backward(xp, dy, inner, **options)
        ended = _event(cupy)
        ended.record()
        attrs = {k: v for k, v in options.items() if k != "into"}
        flop = floor.op_flop(OPS[name], arrays, attrs, "backward")
        # A loss that made its gradients in forward has nothing left to move.
        done = attrs.get("dweight_into") is not None
        into = options.get("into")
        moved = 0.0 if done else floor.op_backward_bytes(OPS[name], dy, inner, gradients, into)
        records.append(Record(name, "backward", started, ended, flop, moved))
        return gradients

    return replace(made, forward=forward, backward=made.backward and backward)


def _event(cupy):
    return cupy.cuda.Event()


def _op_rows(records, eager_ms: float, cupy, rates: floor.Rates) -> list[dict]:
    """Rows by op and direction, largest gap to the floor first; `other` is what is left."""
    rows: dict[tuple, dict] = {}
    for record in records:
        key = (record.name, record.direction)
        empty = {"op": key[0], "direction": key[1], "count": 0, "ms": 0.0, "floor_ms": 0.0}
        row = rows.setdefault(key, empty)
        row["count"] += 1
        row["ms"] += record.milliseconds(cupy)
        floor_s = rates.floor_s(flop=record.flop, bytes_moved=record.bytes_moved)
        row["floor_ms"] += floor_s * 1e3
    found = sorted(rows.values(), key=lambda row: row["floor_ms"] - row["ms"])
    other = eager_ms - sum(row["ms"] for row in found)
    last = {"op": "other", "direction": "-", "count": 0, "ms": other, "floor_ms": 0.0}
    return [*found, last]


def _captured_ms(step: SizedStep, device) -> float:
    started = time.perf_counter()
    for _ in range(5):
        step()
    device.synchronize()
    return (time.perf_counter() - started) * 1e3 / 5


def _by_kernel(step: SizedStep, device) -> list[tuple[str, tuple[int, float]]]:
    """(kernel, (launches, milliseconds)) of one captured step, longest first; [] without torch."""
    try:
        from torch.profiler import ProfilerActivity, profile
    except ModuleNotFoundError:
        return []
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            step()
            device.synchronize()
        path = Path(folder) / "trace.json"
        watched.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    totals: dict[str, list] = collections.defaultdict(lambda: [0, 0.0])
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy"):
            total = totals[event["name"]]
            total[0] += 1
            total[1] += event["dur"] / 1e3
    found = [(name, (count, ms)) for name, (count, ms) in totals.items()]
    return sorted(found, key=lambda item: -item[1][1])


def _print_ops(rows: list[dict], eager_ms: float, captured_ms: float) -> None:
    print(f"one step: eager {eager_ms:.2f} ms, captured {captured_ms:.2f} ms")
    print(f"{'op':24} {'':9} {'count':>5} {'ms':>9} {'floor':>9} {'gap':>9} {'share':>6}")
    for row in rows:
        gap, share = row["ms"] - row["floor_ms"], row["ms"] / eager_ms
        print(
            f"{row['op']:24} {row['direction']:9} {row['count']:5d} {row['ms']:9.3f} "
            f"{row['floor_ms']:9.3f} {gap:9.3f} {share:6.1%}"
        )


def _print_kernels(kernels, captured_ms: float) -> None:
    if not kernels:
        print("kernels: PyTorch, whose profiler sees them, is not installed")
        return
    busy = sum(ms for _, (_, ms) in kernels)
    launches = sum(count for _, (count, _) in kernels)
    print(f"{launches} kernels, {busy:.2f} ms busy of {captured_ms:.2f} ms")
    for name, (count, ms) in kernels[:KERNELS_SHOWN]:
        print(f"{ms:9.3f} ms {count:5d} x {ms / count * 1e3:9.2f} us  {name[:90]}")
