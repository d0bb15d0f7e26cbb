"""Ways to do a training step, timed in turn in one process: what the phases' A/B figures rest on.

ways  = {"on": Way(step, features), "off": Way(step, other_features)}
ratios(here, ways, {"check": ("off", "on")}, rounds=5)      how many times as fast "on" is, by check

A ratio is the median of the rounds' ratios. Beside other work no ratio is given: on a GPU when
another process uses it, on a CPU when others took more of its cores than OTHERS meanwhile.
"""

import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gates.judging.gate import NotMeasured
from xtrain.assemble.learner import configure
from xtrain.assemble.sized_step import SizedStep, Work, load_config
from xtrain.assemble.timing import Contender, interleave, paired_ratio
from xtrain.config.bars import official
from xtrain.config.files import package_conf_dir
from xtrain.config.rules import resolve_features
from xtrain.config.schema import Features, RunConfig
from xtrain.engine.device import Device

Times = Mapping[str, list[float]]
# Cores that others may use while a CPU is timed: on two cores a tenth, which bars of a ratio leave.
OTHERS = 0.2
STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Way:
    """A training step, queued by a call, and the features under which it is called."""

    step: Callable[[], object]
    features: Features


def as_of(phase: str, run: str, device: str, *overrides: str) -> RunConfig:
    """A run with what a phase has switched on on a device, and nothing later."""
    composed = official(run, f"phase={phase}", *overrides)
    features = resolve_features(composed, device)
    return replace(composed, device=device, features=features)


def sized_step(here: Device, features: Features, work: Work) -> SizedStep:
    """The benchmark's training step on random tokens, made under these features."""
    here.restart_peak()  # what earlier steps held goes back first: two big ones may not fit
    configure(here, features)
    work = replace(work, precision=features.precision, remat=features.remat)
    return SizedStep(load_config(work.model, work.seq, package_conf_dir()), work, here)


def ratios(
    here: Device,
    ways: Mapping[str, Way],
    wanted: Mapping[str, tuple[str, str]],
    *,
    rounds: int,
    steps: int = 1,
    beside: Mapping[str, Contender] | None = None,
    stat: Path = STAT,
) -> dict[str, float | NotMeasured]:
    """By check, how many times as fast the second of two ways is as the first.

    beside: other programs, which take turns too and may be wanted by their names.
    NotMeasured for all when other work ran beside them; stat: where a CPU's use by all is counted.
    """
    others, started = others_seconds(stat), time.perf_counter()
    times = seconds(here, ways, rounds=rounds, steps=steps, beside=beside)
    took = time.perf_counter() - started
    declined = busy(here)
    if here.name == "cpu" and others is not None:
        cores = (others_seconds(stat) - others) / took
        if cores > OTHERS:
            declined = NotMeasured(f"other processes used {cores:.1f} of this machine's cores")
    return {check: declined or ratio(times, *pair) for check, pair in wanted.items()}


def busy(here: Device) -> NotMeasured | None:
    """Why no time is worth measuring now, or None: another process uses the GPU."""
    others = here.other_processes()
    return NotMeasured(f"{others} other processes use the GPU") if others else None


def others_seconds(stat: Path = STAT) -> float | None:
    """CPU seconds that all but this process took so far of the cores it may use; None: unknown.

    What a hypervisor gave to other machines counts too.
    """
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return None
    usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    rows = [line.split() for line in lines if line.partition(" ")[0] in usable]
    # user, nice, system, then irq, softirq, steal; idle and iowait lie between.
    ticks = sum(int(field) for row in rows for field in (*row[1:4], *row[6:9]))
    return ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def seconds(
    here: Device,
    ways: Mapping[str, Way],
    *,
    rounds: int,
    steps: int = 1,
    beside: Mapping[str, Contender] | None = None,
) -> Times:
    """Seconds a step of each way, and of each program beside them, in each round."""
    contenders = {name: _contender(here, way) for name, way in ways.items()}
    return interleave(contenders | dict(beside or {}), rounds=rounds, steps=steps)


def ratio(times: Times, slow: str, fast: str) -> float:
    """The median over the rounds of the time of one way over that of another."""
    return paired_ratio(times[slow], times[fast])


def _contender(here: Device, way: Way) -> Contender:
    prepare = functools.partial(configure, here, way.features)
    return Contender(way.step, here.synchronize, prepare)
