"""Ways to do a training step, timed in turn in one process: what the phases' A/B figures rest on.

ways  = {"on": Way(step, features), "off": Way(step, other_features)}
times = seconds(here, ways, rounds=5)
ratio(times, "off", "on")       how many times as fast "on" is: the median of the rounds' ratios
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

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


def busy(here: Device) -> NotMeasured | None:
    """Why no time is worth measuring now, or None: another process uses the GPU."""
    others = here.other_processes()
    return NotMeasured(f"{others} other processes use the GPU") if others else None


def seconds(here: Device, ways: Mapping[str, Way], *, rounds: int, steps: int = 1) -> Times:
    """Seconds a step of each way in each round."""
    contenders = {name: _contender(here, way) for name, way in ways.items()}
    return interleave(contenders, rounds=rounds, steps=steps)


def ratio(times: Times, slow: str, fast: str) -> float:
    """The median over the rounds of the time of one way over that of another."""
    return paired_ratio(times[slow], times[fast])


def _contender(here: Device, way: Way) -> Contender:
    prepare = functools.partial(configure, here, way.features)
    return Contender(way.step, here.synchronize, prepare)
