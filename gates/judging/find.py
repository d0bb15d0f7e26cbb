"""Gate files by name: `T13` and `t13` name `gates/t13_<slug>.py`, `v0` the run `conf/run/v0.yaml`.

A run has no gate file, unless it measures something of its own: `gates/trained_run.py` judges all
by the bars in their files. Finding reads file names only, so that a listing or a misspelt name
imports no measurement.
"""

import difflib
import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from gates.judging.gate import Gate
from xtrain.config.files import choices, choices_of, package_conf_dir
from xtrain.errors import UsageError

HERE = Path(__file__).resolve().parents[1]
_FILE = re.compile(r"(?P<id>[a-z]+\d+[a-z]?)_\w+")


@dataclass(frozen=True)
class GateFile:
    """Where a gate is: its id in lower case, its file, and whether it is the gate of any run."""

    id: str
    path: Path
    is_of_run: bool = False

    def load(self) -> Gate:
        """Import the file and return its GATE. Raises UsageError when it declares another id."""
        if self.is_of_run:
            return importlib.import_module("gates.trained_run").gate_of(self.id)
        if self.path.parent == HERE:
            module = importlib.import_module(f"gates.{self.path.stem}")
        else:
            module = _import_file(self.path)
        gate = getattr(module, "GATE", None)
        if not isinstance(gate, Gate) or gate.id.lower() != self.id:
            raise UsageError(f"{self.path.name}: declares no GATE with id {self.id.upper()}")
        return gate


def find_gates(directory: Path = HERE) -> dict[str, GateFile]:
    """Every gate by lower-case id, phases before runs before other gates.

    Of a directory its files; of the project's own also the run files that have none. Raises
    UsageError when two files share an id.
    """
    found: dict[str, GateFile] = {}
    for path in sorted(directory.glob("*.py")):
        match = _FILE.fullmatch(path.stem)
        if match is None:
            continue
        name = match["id"]
        if name in found:
            raise UsageError(
                f"{found[name].path.name} and {path.name} are both gate {name.upper()}"
            )
        found[name] = GateFile(name, path)
    if directory == HERE:
        for name in dict.fromkeys([*choices_of(package_conf_dir(), "run"), *choices("run")]):
            found.setdefault(name, GateFile(name, HERE / "trained_run.py", is_of_run=True))
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def choose_gates(names: list[str], found: dict[str, GateFile]) -> list[GateFile]:
    """The gate files of these names in the order given, each once; `all` is every gate.

    Raises UsageError naming the nearest gates when a name is unknown.
    """
    chosen: dict[str, GateFile] = {}
    for name in names:
        if name.lower() == "all":
            chosen.update(found)
        elif name.lower() in found:
            chosen[name.lower()] = found[name.lower()]
        else:
            raise UsageError(f"unknown gate {name!r}; {_nearest(name, found)}")
    return list(chosen.values())


def _nearest(name: str, found: dict[str, GateFile]) -> str:
    if not found:
        return "there are no gates here"
    near = difflib.get_close_matches(name.lower(), found, n=3, cutoff=0.6)
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"choose from {', '.join(found)}"


def _order(name: str) -> tuple[int, int, str]:
    """Numbered kinds first, by number; runs under names of their own come last."""
    numbered = re.fullmatch(r"([tvm])(\d+)([a-z]?)", name)
    if not numbered:
        return 3, 0, name
    return "tvm".index(numbered[1]), int(numbered[2]), numbered[3]


def _import_file(path: Path):
    name = f"_gate_{abs(hash(path))}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
