"""`xtrain-bench [NAME] [--peer] [--json]`: measure speed on this machine.

Nothing heavy is imported before the arguments are understood and the threads are set.
"""

import argparse
import difflib
import os
import sys
from dataclasses import replace

from xtrain.command.ending import run_command

NAMES = {
    "cpu_train": "the training step of v0 on the CPU, 8 x 64 tokens, fp32",
    "train_step": "the training step of --model on the GPU",
    "ops": "every op of a training step against its byte or FLOP floor",
    "products": "every bf16 product of a step, cuBLAS's algorithm against its other candidates",
    "profile": "one training step, time by op and by kernel against their floors",
}
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    epilog = "\n".join(f"  {name:11} {what}" for name, what in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="xtrain-bench",
        description="Measure speed: median of interleaved rounds, floor, ratio to the peer.",
        epilog=f"names:\n{epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="what to measure; all this device can when absent")
    parser.add_argument("--peer", action="store_true", help="run the PyTorch peer in turn")
    parser.add_argument("--peer-mode", choices=("compile", "eager"), help="compile on a GPU")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--model", help="a name in conf/model (v0 on the CPU, v9 on a GPU)")
    parser.add_argument("--batch", type=int, help="sequences in a micro-batch (8, or 32)")
    parser.add_argument("--seq", type=int, help="tokens in a sequence (64, or 1024)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="fp32 on the CPU, else bf16")
    parser.add_argument("--remat", choices=("none", "mlp", "block"), default="none")
    parser.add_argument("--op", help="only this op (ops)")
    parser.add_argument("--write", metavar="FILE", help="add what is faster to a table (products)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each program")
    parser.add_argument("--steps", type=int, default=5, help="timed steps in a turn")
    parser.add_argument("--threads", type=int, help="CPU threads of both programs (all cores)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark, or all that the device can; returns the exit code."""
    return run_command("xtrain-bench", _main, arguments)


def _main(arguments: list[str] | None) -> int:
    options = parse(arguments)
    if options.name is not None and options.name not in NAMES:
        near = difflib.get_close_matches(options.name, NAMES, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return _usage(f"unknown benchmark {options.name!r}{hint}; names: {', '.join(NAMES)}")
    for option in ("batch", "seq", "accumulation", "rounds", "steps", "threads"):
        value = getattr(options, option)
        if value is not None and value < 1:
            return _usage(f"--{option} {value}: must be at least 1")
    threads = options.threads or len(os.sched_getaffinity(0))
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))  # read once, at import

    from benchmarks.result import show
    from xtrain.errors import UsageError

    try:
        names = [options.name] if options.name else _possible()
        results = [r for name in names for r in _run(name, options, threads)]
    except UsageError as error:
        return _usage(str(error))
    show(results, as_json=options.json)
    return 0


def _usage(message: str) -> int:
    print(f"xtrain-bench: {message}", file=sys.stderr)
    return 2


def _possible() -> list[str]:
    return ["cpu_train", "train_step", "ops"] if _has_gpu() else ["cpu_train", "ops"]


def _has_gpu() -> bool:
    from xtrain.engine.device import resolve

    return resolve("auto") == "cuda"


def _run(name: str, options: argparse.Namespace, threads: int) -> list:
    match name:
        case "ops":
            from benchmarks.ops import measure_ops

            works = [_work(options, on_gpu=_has_gpu())]
            if _has_gpu() and options.model is None:  # both sizes that the bars are stated for
                works.append(replace(works[0], model="v12", batch=options.batch or 16))
            return [result for work in works for result in measure_ops(work, options.op)]
        case "products":
            from benchmarks.products import measure_products

            return measure_products(_work(options, on_gpu=True), options.write)
        case "profile":
            from benchmarks.profile import profile_step

            return profile_step(_work(options, on_gpu=True), show=not options.json)
    from benchmarks.train_step import time_step

    on_gpu = name == "train_step"
    default_mode = "compile" if on_gpu else "eager"  # on a CPU compiling gains nothing
    peer = (options.peer_mode or default_mode) if options.peer else None
    if peer and not on_gpu:
        import torch

        torch.set_num_threads(threads)
    return [
        time_step(
            name,
            _work(options, on_gpu=on_gpu),
            backend="cuda" if on_gpu else "cpu",
            rounds=options.rounds,
            steps=options.steps,
            peer=peer,
        )
    ]


def _work(options: argparse.Namespace, *, on_gpu: bool):
    from xtrain.assemble.sized_step import Work

    return Work(
        model=options.model or ("v9" if on_gpu else "v0"),
        batch=options.batch or (32 if on_gpu else 8),
        seq=options.seq or (1024 if on_gpu else 64),
        precision=options.precision or ("bf16" if on_gpu else "fp32"),
        accumulation=options.accumulation,
        remat=options.remat,
    )


if __name__ == "__main__":
    sys.exit(main())
