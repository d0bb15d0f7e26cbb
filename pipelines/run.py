"""One run from its config to its verdict: prepare, train, evaluate, sample, export, judge, promote.

What can be refused is refused before anything is written. Whatever happens later, the run directory
says how it ended, and `resume=auto` goes on from the last complete checkpoint.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from gates.judging.audit import refuse_foreign
from gates.judging.ledger import Ledger
from gates.judging.promote import granted_by
from pipelines import PROGRAM, pretrain, verdict
from pipelines.ahead import said_of_promotion
from pipelines.end import end_run
from pipelines.prepare import prepare_data
from xtrain.assemble.estimate import describe, run_memory_bytes, what_would_fit
from xtrain.assemble.learner import build, eval_windows, training_windows
from xtrain.assemble.origin import Origin, check_vocabulary, load_origin, start_from
from xtrain.command.signals import noting, raising
from xtrain.command.streams import shown
from xtrain.config.compose import resolved_yaml
from xtrain.config.identity import BOOKKEEPING, config_fingerprint
from xtrain.config.rules import resolve_features
from xtrain.config.schema import RunConfig
from xtrain.data.dataset import data_cache
from xtrain.engine import device as devices
from xtrain.errors import (
    Interrupted,
    OutOfDeviceMemory,
    UsageError,
    WriteError,
    is_of_the_disk,
    write_error,
)
from xtrain.track.machine import device_facts
from xtrain.track.mirror import Mirror, catch_up, reap_stale
from xtrain.track.registry import register_owed
from xtrain.track.resume import choose_run, continue_run, take_over
from xtrain.track.room import Room, room
from xtrain.track.run_dir import RUNNING, RunDir, open_run, read_run
from xtrain.track.store_address import check_store, store_uri
from xtrain.train import checkpoint


def execute(run: RunConfig, typed: Sequence[str]) -> int:
    """Run it; returns the exit code. typed: the overrides as the user wrote them.

    Raises UsageError, before anything is written, for what the user can put right, and Interrupted
    after SIGINT, SIGTERM or SIGHUP, with a complete checkpoint kept.
    """
    run = resolve(run)
    with raising(PROGRAM):
        match run.phase.name:
            case "decode":
                from pipelines.decode import decode

                return decode(run, typed, say)
            case "eval":
                from pipelines.evaluate import evaluate_run

                return evaluate_run(run, typed, say)
        return train_and_judge(run, typed)


def train_and_judge(run: RunConfig, typed: Sequence[str]) -> int:
    """Everything that ends in a verdict; the run is resolved."""
    root = Path(run.out)
    check_store(store_uri())
    ledger = Ledger.of(root)
    broken = ledger.verify()
    if broken:
        raise UsageError(f"{broken}; move the file away, for none of its verdicts counts any more")
    refuse_foreign(run.init_from, ledger)
    run, origin = start_from(run, typed)
    say("\n".join([describe(run), *said_of_promotion(run)]))
    check_vocabulary(run)
    check_room(run, room() if run.device == "cpu" else None)
    _choose(run, typed)  # what differs is refused before the text is prepared
    for path in reap_stale(root, say):
        say(f"{path} had no process any more: marked KILLED")
    catch_up(root, say)
    register_owed(root, granted_by(ledger), say)
    prepared = prepare_data(run.data, data_cache(root))
    training_windows(run, prepared)  # raises when the text is too short for one sequence
    eval_windows(run, prepared)
    out, notice = _choose(run, typed, {"data": prepared.fingerprint})
    if notice:
        say(notice)
    with closing(take_over(out)) if out is not None else nullcontext():
        return _train_from(run, origin, prepared, out)


def _train_from(run: RunConfig, origin: Origin | None, prepared, found: RunDir | None) -> int:
    """Build the model, give it its weights, and train it in the run directory found or a new one.

    prepared: the data; found: a run of this process to go on with.
    """
    with saying_what_would_fit(run):
        learner = build(run, initialize=origin is None)
        if origin is not None:
            load_origin(origin, learner)
    if found is None:
        return _under_way(run, learner, prepared, partial(_open_new, run, prepared), 0)
    start, lines = pretrain.resume_point(run, found, learner, _checkpoint_named(run.resume))
    for line in lines:
        say(line)
    facts = device_facts(run.device)
    take_up = partial(continue_run, found, from_step=start, facts=facts)
    return _under_way(run, learner, prepared, take_up, start)


def _open_new(run: RunConfig, prepared) -> RunDir:
    return open_run(
        Path(run.out),
        run.name,
        run.phase.name,
        dataclasses.asdict(run),
        config_text=resolved_yaml(run),
        fingerprints={
            "config": config_fingerprint(run),
            "eval_set": eval_windows(run, prepared).fingerprint,
            "data": prepared.fingerprint,
        },
        facts=device_facts(run.device),
    )


def _choose(
    run: RunConfig, typed: Sequence[str], fingerprints: dict[str, str] | None = None
) -> tuple[RunDir | None, str]:
    """The run directory to go on with, or None, and a line to say; UsageError for what differs."""
    wanted = _checkpoint_named(run.resume)
    return choose_run(
        run.out,
        run.name,
        run.phase.name,
        dataclasses.asdict(run),
        resume=run.resume if wanted is None else str(wanted.parent.parent),
        typed=any(override.startswith("resume=") for override in typed),
        fingerprints=fingerprints,
        ignore=[key.rstrip(".") for key in BOOKKEEPING],
    )


def resolve(run: RunConfig) -> RunConfig:
    """The run with its device and features decided, as they are recorded and compared."""
    device = devices.resolve(run.device)
    features = resolve_features(run, device)
    return dataclasses.replace(run, device=device, features=features)


def _under_way(
    run: RunConfig, learner, prepared, take_directory: Callable[[], RunDir], start: int
) -> int:
    """Everything from the moment the run directory exists; marks how the run ended."""
    out, mirror, ended = None, None, "FAILED"

    def mark_killed() -> None:
        if out is not None and out.manifest["status"] == RUNNING:
            out.set_status("KILLED")

    with raising(PROGRAM, last_words=mark_killed):
        try:
            with noting() as stop:
                out = take_directory()
                mirror = Mirror(out).start()
                _introduce(out)
                with saying_what_would_fit(run, out), saying_what_is_kept(out):
                    pretrain.train(run, learner, prepared, out, start=start, stop=stop)
            with saying_what_would_fit(run, out), saying_what_is_kept(out):
                code = verdict.conclude(run, learner, out, mirror, say)
            ended = "FINISHED"
            return code
        except (Interrupted, KeyboardInterrupt):
            ended = "KILLED"
            raise
        finally:
            if out is not None:
                end_run(out, mirror, ended, say)


def _introduce(out: RunDir) -> None:
    say(f"run directory {out.path}")
    if not out.is_owned:
        say("its file system has no locks: that two processes train one run would not be noticed")


@contextmanager
def saying_what_would_fit(run: RunConfig, out: RunDir | None = None) -> Iterator[None]:
    """Turn a full memory into one line: what was asked for, what would fit, which checkpoint is
    kept.

    out: the run directory, once there is one.
    """
    try:
        yield
    except (OutOfDeviceMemory, MemoryError) as full:
        if isinstance(full, OutOfDeviceMemory):
            asked, total = str(full).partition(";")[0], full.total_bytes
        else:
            asked, bound = f"memory is full: {full}".removesuffix(": "), room()
            total = bound.bytes if bound else 0
        parts = [asked, what_would_fit(run, run.device, total), _what_is_kept(out)]
        raise OutOfDeviceMemory("; ".join(parts), total) from full


def check_room(run: RunConfig, bound: Room | None) -> None:
    """Raise UsageError, with what would fit, when a run on a CPU needs more than it may hold."""
    if bound is None:
        return
    needed = run_memory_bytes(run, run.device)
    if needed.largest > bound.bytes:
        raise UsageError(
            f"run={run.name} needs {needed.largest / 1e9:.3g} GB for {needed.fullest}, "
            f"{bound.bound} leaves {bound.bytes / 1e9:.3g} GB; "
            f"{what_would_fit(run, run.device, bound.bytes)}"
        )


@contextmanager
def saying_what_is_kept(out: RunDir) -> Iterator[None]:
    """Turn a disk that is full or read-only, or a run directory that is gone, into one line."""
    try:
        yield
    except Exception as error:
        if not out.path.is_dir():
            raise WriteError(f"run directory {out.path} was deleted or moved away") from error
        if isinstance(error, WriteError) or is_of_the_disk(error):
            raise write_error(out.path, error, _what_is_kept(out)) from error
        raise


def _what_is_kept(out: RunDir | None) -> str:
    kept, _ = checkpoint.latest(out.path / "checkpoints") if out else (None, [])
    return f"checkpoint {kept.path} is kept" if kept else "there is no checkpoint yet"


def _checkpoint_named(resume: str) -> Path | None:
    """`resume=` may name one checkpoint of a run instead of the run: `RUN/checkpoints/400`."""
    path = Path(resume)
    if resume in ("auto", "none") or path.parent.name != "checkpoints":
        return None
    if not path.is_dir():
        raise UsageError(f"resume={resume}: no such checkpoint")
    read_run(path.parent.parent)
    return path


def say(line: str) -> None:
    """A line for people, on stderr."""
    print(shown(line), file=sys.stderr, flush=True)
