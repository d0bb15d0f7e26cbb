"""Programs timed in turn in one process: what every ratio of speeds rests on.

    times = interleave({"ours": ours, "peer": peer}, rounds=5, steps=3)
    paired_ratio(times["peer"], times["ours"])      how many times as fast ours is

Each round gives every program its turn, forth in one round and back in the next, so that a machine
that warms up or slows down favours none of them.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contender:
    """A program to time.

    step: queues one step's work. finish: waits for all that is queued. prepare: called before each
    turn, outside of the clock.
    """

    step: Callable[[], object]
    finish: Callable[[], object]
    prepare: Callable[[], object] = _nothing

    def seconds(self, steps: int) -> float:
        """Wall seconds a step, over `steps` steps ended by one wait."""
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.finish()
        return (time.perf_counter() - started) / steps

    def turn(self, steps: int) -> float:
        """One step that is not timed, which brings memory, caches and thread pools back, then
        `steps` that are."""
        self.prepare()
        self.seconds(1)
        return self.seconds(steps)


def interleave(
    contenders: Mapping[str, Contender], *, rounds: int, steps: int = 1, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds a step of each program in each round, after `warm_up` steps that are not counted."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender.prepare()
        contender.seconds(warm_up)
    for number in range(rounds):
        order = list(contenders)
        for name in order if number % 2 == 0 else reversed(order):
            taken[name].append(contenders[name].turn(steps))
    return taken


def paired_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """The median over the rounds of one program's time over another's: how often it is as fast."""
    return statistics.median(s / f for s, f in zip(slow, fast, strict=True))
