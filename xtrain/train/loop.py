"""The one loop: load a batch, step, log, evaluate, save. What differs is handed in.

Everything a step depends on is a function of its number, so the loop has no state to lose: started
at step s with the checkpoint of step s, it goes on as if it had never stopped.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from xtrain.errors import Interrupted
from xtrain.train.config import OptimConfig, TrainConfig
from xtrain.train.optimizer import learning_rate
from xtrain.train.step import TrainingStep


@dataclass(frozen=True)
class Hooks:
    """What the loop asks of its surroundings, as plain functions.

    log(step, values): one line of metrics.  evaluate(step): evaluate and log.  save(step): keep a
    checkpoint of what `step` steps have made.  stop(): the signal that asks for an end, or None.
    """

    log: Callable[[int, dict], None]
    evaluate: Callable[[int], None]
    save: Callable[[int], None]
    stop: Callable[[], int | None]


def train(
    step: TrainingStep,
    source,
    *,
    start: int,
    train_config: TrainConfig,
    optim_config: OptimConfig,
    hooks: Hooks,
) -> None:
    """Run steps start .. total - 1. A step's number in the log is how many steps are done after it.

    Raises Interrupted after saving a complete checkpoint when `hooks.stop` gives a signal.
    """
    last, per_step = train_config.total_steps, train_config.tokens_per_step
    if start == 0:
        hooks.evaluate(0)
    clock = wall = time.perf_counter()
    clocked = start
    for number in range(start, last):
        lr = learning_rate(optim_config, number, last)
        step.load(source.batch(number), number, lr)
        loss, grad_norm = step.run()
        done = number + 1
        if done % train_config.log_every_steps == 0 or done == last:
            values = {
                "loss": float(step.device.host(loss)),
                "grad_norm": float(step.device.host(grad_norm)),
                "lr": lr,
                "tokens": done * per_step,
                "epoch": source.epoch(number),
                "skipped": int(step.device.host(step.optimizer.skipped)),
            }
            now = time.perf_counter()
            tokens = (done - clocked) * per_step
            values["tok_s"] = tokens / max(now - clock, 1e-9)
            values["wall_tok_s"] = tokens / max(now - wall, 1e-9)
            hooks.log(done, values)
            clock, wall, clocked = now, now, done
        if done % train_config.eval_every_steps == 0 or done == last:
            paused = time.perf_counter()
            hooks.evaluate(done)
            # tok_s is of training alone; wall_tok_s has the evaluations and saves before it too.
            clock += time.perf_counter() - paused
        signal = hooks.stop()
        if signal is not None or done % train_config.save_every_steps == 0 or done == last:
            paused = time.perf_counter()
            hooks.save(done)
            clock += time.perf_counter() - paused
        if signal is not None and done < last:
            raise Interrupted(signal)
