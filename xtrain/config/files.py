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
    return package_conf_dir()


def package_conf_dir() -> Path:
    """The directory of the files that the package came with, whatever XTRAIN_CONF names.

    The bars of the package's own runs and phases are read there, and what gates compose. Raises
    UsageError when there is none.
    """
    here = Path(__file__).resolve().parents[1]
    for candidate in (here / "conf", here.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise UsageError("no conf/ found beside or inside xtrain: name one with XTRAIN_CONF=DIR")


def file_of(group: str, name: str) -> Path | None:
    """The file of a run, phase or gate on which a verdict rests: the package's, where it has one.

    A file of one's own counts under a name of one's own. None when there is no such file.
    """
    for root in (package_conf_dir(), conf_dir()):
        if (root / group / f"{name}.yaml").is_file():
            return root / group / f"{name}.yaml"
    return None


def is_of_package(group: str, name: str) -> bool:
    """Whether the package has a file of that name, whatever XTRAIN_CONF names."""
    return (package_conf_dir() / group / f"{name}.yaml").is_file()


def choices(group: str, *extra_dirs: str | Path) -> list[str]:
    """The names of a config group (`run`, `phase`, `model`, `data`), v2 before v10."""
    found = {name for root in (conf_dir(), *extra_dirs) for name in choices_of(Path(root), group)}
    return sorted(found, key=_by_number)


def choices_of(root: Path, group: str) -> list[str]:
    """The names of a group in one directory, v2 before v10."""
    return sorted((path.stem for path in (root / group).glob("*.yaml")), key=_by_number)


def _by_number(name: str) -> tuple[str, int, str]:
    letters = name.rstrip("0123456789")
    digits = name[len(letters) :]
    return letters, int(digits or -1), name
