"""Where the YAML files are: beside the packages in a checkout, inside `xtrain/` in a wheel."""

import os
from pathlib import Path

from xtrain.errors import UsageError


def conf_dir() -> Path:
    """The absolute directory that holds config.yaml; XTRAIN_CONF overrides it.

    Raises UsageError when XTRAIN_CONF names no such directory, or none is found.
    """
    named = os.environ.get("XTRAIN_CONF")
    if named:
        if not (Path(named) / "config.yaml").is_file():
            raise UsageError(f"XTRAIN_CONF={named} holds no config.yaml")
        return Path(named).resolve()
    here = Path(__file__).resolve().parents[1]
    for candidate in (here / "conf", here.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise UsageError("no conf/ found beside or inside xtrain: name one with XTRAIN_CONF=DIR")


def choices(group: str, *extra_dirs: str | Path) -> list[str]:
    """The names of a config group (`run`, `phase`, `model`, `data`), v2 before v10."""
    found = {
        path.stem
        for root in (conf_dir(), *map(Path, extra_dirs))
        for path in (root / group).glob("*.yaml")
    }
    return sorted(found, key=_by_number)


def _by_number(name: str) -> tuple[str, int, str]:
    letters = name.rstrip("0123456789")
    digits = name[len(letters) :]
    return letters, int(digits or -1), name
