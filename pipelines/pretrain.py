"""Train a model of a run: data, model, step and loop put together, on any device.

This is the stage behind `phase=pretrain` and the T phases: next-token training on packed windows.
"""

import time
from collections.abc import Callable
from pathlib import Path

from pipelines.progress import Progress
from xtrain.assemble.learner import (
    Learner,
    eval_windows,
    heldout_loss,
    training_step,
    training_windows,
)
from xtrain.config.identity import config_fingerprint
from xtrain.config.schema import RunConfig
from xtrain.data.dataset import Prepared
from xtrain.data.tokenizers.imported import load_tokenizer
from xtrain.errors import Interrupted
from xtrain.infer.generate import generate
from xtrain.track.run_dir import RunDir, read_metrics, value_of
from xtrain.train import checkpoint, loop
from xtrain.train.evaluate import Evaluation

SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOP_K = 50


def train(run: RunConfig, learner: Learner, prepared: Prepared, out: RunDir, *, start: int, stop):
    """Train from step `start` to the end, logging to `out` and saving checkpoints below it.

    Raises Interrupted after a signal, with a complete checkpoint saved.
    """
    step = training_step(run, learner)
    held_out = eval_windows(run, prepared)
    facts = {"run": run.name, "config": config_fingerprint(run), "data": prepared.fingerprint}
    losses = {r["step"]: value_of(r, "loss") for r in read_records(out, "eval")}
    trained, began = [0], time.perf_counter()
    _end_if_asked(stop)  # while the directory was made, or MLflow imported

    with Progress(run.train.total_steps, start) as progress:

        def log(number: int, values: dict) -> None:
            out.log(number, values | {"memory_bytes": learner.device.memory().peak_bytes})
            progress.show(number, values)
            trained[0] = (number - start) * run.train.tokens_per_step

        def evaluate_now(number: int) -> None:
            result = heldout_loss(run, learner, held_out)
            losses[number] = result.loss
            out.log(number, evaluation_record(result), kind="eval")
            progress.say(f"step {number}  held-out loss {result.loss:.4f}")
            if number == 0:
                _end_if_asked(stop)  # nothing has been trained that a checkpoint would keep

        def save(number: int) -> None:
            directory = out.path / "checkpoints"
            tokens = number * run.train.tokens_per_step
            out.sync()  # no checkpoint without the records that led to it
            checkpoint.save(
                directory,
                number,
                learner.buffers,
                learner.optimizer,
                learner.device,
                facts | {"tokens": tokens},
            )
            saved = [n for n in losses if (directory / str(n)).is_dir()]
            best = min(saved, key=lambda n: losses[n], default=None)
            keep_last = run.train.keep_last
            checkpoint.prune(directory, saved=number, keep_last=keep_last, best_step=best)

        loop.train(
            step,
            training_windows(run, prepared),
            start=start,
            train_config=run.train,
            optim_config=run.optim,
            hooks=loop.Hooks(log=log, evaluate=evaluate_now, save=save, stop=stop),
        )
        progress.say(_speed(trained[0], time.perf_counter() - began))


def _speed(tokens: int, seconds: float) -> str:
    """What the whole training did a second, which the speed of the steps alone overstates."""
    rate = tokens / max(seconds, 1e-9)
    return (
        f"{tokens:,} tokens in {seconds:,.1f} s: {rate:,.0f} tok/s, evaluations and saves included"
    )


def _end_if_asked(stop: Callable[[], int | None]) -> None:
    signal = stop()
    if signal is not None:
        raise Interrupted(signal)


def evaluation_record(result: Evaluation) -> dict:
    return {
        "loss": result.loss,
        "standard_error": result.standard_error,
        "perplexity": result.perplexity,
        "eval_tokens": result.tokens,
    }


def read_records(out: RunDir, kind: str) -> list[dict]:
    path = out.path / "metrics.jsonl"
    return read_metrics(path, kind) if path.exists() else []


def resume_point(
    run: RunConfig, out: RunDir, learner: Learner, wanted: Path | None
) -> tuple[int, list[str]]:
    """Restore a checkpoint; returns its step and notices.

    It is the one asked for, else the last complete one whose records are whole: a run that lacks
    some would be refused at its end.
    """
    records, damaged_line = out.sound_records()
    notices = [damaged_line] if damaged_line else []
    if wanted is not None:
        found = checkpoint.load_manifest(wanted)
        notices += filter(None, [_missing_records(run, out, records, found.step)])
    else:
        found, lines = _last_whole(run, out, records)
        notices += [f"passed over: {line}" for line in lines]
    if found is None:
        return 0, [*notices, "no complete checkpoint yet: starting at step 0"]
    checkpoint.restore(found, learner.buffers, learner.optimizer, learner.device)
    return found.step, [*notices, f"resuming from checkpoint {found.path}"]


def _last_whole(
    run: RunConfig, out: RunDir, records: list[dict]
) -> tuple[checkpoint.Checkpoint | None, list[str]]:
    passed = []
    for found, line in checkpoint.newest_first(out.path / "checkpoints"):
        lacking = line or _missing_records(run, out, records, found.step)
        if not lacking:
            return found, passed
        passed.append(lacking)
    return None, passed


def _missing_records(run: RunConfig, out: RunDir, records: list[dict], step: int) -> str:
    """A line when the last records before a checkpoint were lost, else "".

    The intervals may have been changed since: those that the run began with count as well.
    """
    began = out.manifest.get("config", {}).get("train", {})
    for kind, key in (("train", "log_every_steps"), ("eval", "eval_every_steps")):
        now = getattr(run.train, key)
        last = max((r["step"] for r in records if r["kind"] == kind), default=0)
        wanted = [step - step % each for each in {now, began.get(key, now)}]
        if last < min(wanted):
            where = out.path / "checkpoints" / str(step)
            return f"checkpoint {where}: metrics.jsonl ends at step {last} ({kind})"
    return ""


def sample(run: RunConfig, learner: Learner) -> list[tuple[str, str]]:
    """(prompt, continuation) for each prompt of the run."""
    tokenizer = load_tokenizer(run.data.tokenizer)
    prompts = run.train.prompts
    if not prompts or run.train.sample_tokens == 0:
        return []
    ids = generate(
        learner.model,
        [tokenizer.encode_ordinary(p) or [tokenizer.eot] for p in prompts],
        max_new_tokens=run.train.sample_tokens,
        temperature=SAMPLE_TEMPERATURE,
        top_k=SAMPLE_TOP_K,
        seed=run.seed,
        stop_id=tokenizer.eot,
    )
    return [(p, tokenizer.decode(row)) for p, row in zip(prompts, ids, strict=True)]
