"""What a benchmark reports, and how it is printed."""

import dataclasses
import json
from dataclasses import dataclass, field
from importlib import metadata

PACKAGES = (
    "numpy",
    "numba",
    "numba-cuda",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvmath-python",
    "torch",
)


@dataclass(frozen=True)
class Result:
    """One measurement. ours, peer and floor are in `unit`; None where nothing was measured.

    floor: what the device's measured limits allow, in the same unit (a rate when unit is a rate).
    ratio: ours over the peer, above 1 is faster: the median of the rounds' paired ratios.
    detail: further figures, each key ending in its unit.
    """

    name: str
    work: dict
    device: str
    unit: str
    ours: float
    floor: float | None
    peer: float | None = None
    ratio: float | None = None
    rounds: int = 1
    versions: dict = field(default_factory=dict)
    detail: dict = field(default_factory=dict)


def versions() -> dict[str, str]:
    """Versions of the packages a figure depends on, those that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def show(results: list[Result], *, as_json: bool) -> None:
    """Print results: one JSON list, or lines for people."""
    if as_json:
        print(json.dumps([dataclasses.asdict(r) for r in results]))
        return
    for r in results:
        print(f"{r.name}  {_pairs(r.work)}  on {r.device}")
        print(f"  ours  {_figure(r.ours)} {r.unit}, floor {_figure(r.floor)}, rounds {r.rounds}")
        if r.peer is not None:
            print(f"  peer  {_figure(r.peer)} {r.unit}, ratio {r.ratio:.2f}")
        if r.detail:
            print(f"  {_pairs(r.detail)}")
    if results:
        print(_pairs(results[0].versions))


def _pairs(values: dict) -> str:
    return ", ".join(f"{k} {_figure(v)}" for k, v in values.items())


def _figure(value) -> str:
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
