"""When another version of a library makes a verdict stale.

A verdict records the versions that it was measured with (`xtrain.track.machine`). It no longer
holds once the major or minor version of NumPy or Numba is another one, on a GPU also that of
Numba-CUDA or CuPy, or the major version of the driver: these compile or run the kernels that were
measured. A patch release, another Python and another machine change nothing. A verdict of a device
class that this machine does not have is compared with nothing here: it speaks of its own machine.
"""

from collections.abc import Mapping

from xtrain.engine.device import resolve
from xtrain.errors import UsageError
from xtrain.track.machine import device_facts

OF_CPU = ("numpy", "numba")
OF_GPU = (*OF_CPU, "numba-cuda", "cupy-cuda12x", "cupy-cuda13x")


def changed_versions(entry: Mapping, device: str) -> list[str]:
    """What differs from the versions of a verdict on a device class, such as `numpy 2.3 to 2.4`."""
    facts = facts_here(device)
    return [] if facts is None else differing_versions(entry.get("facts", {}), facts, device)


def facts_here(device: str) -> dict | None:
    """The facts of this machine, None when it has no such device."""
    try:
        return device_facts(resolve(device))
    except UsageError:
        return None


def differing_versions(then: Mapping, now: Mapping, device: str) -> list[str]:
    """The deciding versions in which two machines' facts differ; unknown ones are left out."""
    old, new = then.get("versions", {}), now.get("versions", {})
    pairs = [(name, old.get(name), new.get(name), 2) for name in names_of(device)]
    if device == "cuda":
        drivers = (facts.get("gpu", {}).get("driver") for facts in (then, now))
        pairs.append(("driver", *drivers, 1))
    return [
        f"{name} {_part(was, parts)} to {_part(is_now, parts)}"
        for name, was, is_now, parts in pairs
        if was and is_now and _part(was, parts) != _part(is_now, parts)
    ]


def names_of(device: str) -> tuple[str, ...]:
    """The packages whose version decides on a device class."""
    return OF_GPU if device == "cuda" else OF_CPU


def _part(version: str, parts: int) -> str:
    return ".".join(version.split(".")[:parts])
