"""The code fingerprint of a gate: sha256 over what its measurement imports and composes.

The import closure is found by walking syntax trees, without importing anything, and is restricted
to the project's packages: a gate that does not import `xtrain.data` is not made stale by a change
there, and a README edit stales nothing. Three things that plain imports do not show are followed:

- `import_module` by name: every string in such a file that is a project module counts, and an
  f-string counts as a pattern (`f"xtrain.cpu.{name}"` is every module of `xtrain/cpu`, and so is
  `f"{__name__}.{name}"` in its own file);
- packages that load all their modules (`pkgutil.iter_modules`, `walk_packages`);
- data files beside the code (CUDA C++ sources, golden arrays) that it names in a string.
"""

import ast
import hashlib
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from xtrain.config.files import file_of
from xtrain.errors import UsageError

PACKAGES = ("xtrain", "pipelines", "gates", "benchmarks")
CPU_KERNELS = "xtrain.cpu."


def code_fingerprint(
    gate_file: Path,
    composes: Iterable[str] = (),
    roots: Mapping[str, Path] | None = None,
    *,
    device: str,
) -> str:
    """Hex sha256 over the gate file, its import closure and the named configs.

    composes: config names relative to conf/, with or without `.yaml`. roots: as package_roots.
    device: the device class whose verdict it is, cpu or cuda. A GPU's verdict does not hang on the
    CPU's kernels, unless the gate's own file names the CPU: then it measures there too. Raises
    UsageError when a config does not exist.
    """
    closure = import_closure(gate_file, roots)
    if device == "cuda" and "cpu" not in _strings(ast.parse(gate_file.read_bytes())):
        closure = {n: path for n, path in closure.items() if not n.startswith(CPU_KERNELS)}
    return hash_files({**closure, **_configs(composes)})


def hash_files(files: dict[str, Path]) -> str:
    """Hex sha256 over (name, content) in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name}\0{hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def import_closure(start: Path, roots: Mapping[str, Path] | None = None) -> dict[str, Path]:
    """Every project file that `start` reaches, by a name that does not depend on the machine."""
    modules = _all_modules(package_roots() if roots is None else roots)
    by_path = {path: name for name, path in modules.items()}
    start = start.resolve()
    files: dict[str, Path] = {}
    waiting = [(by_path.get(start, f"gates.{start.stem}"), start)]
    while waiting:
        name, path = waiting.pop()
        if name in files:
            continue
        files[name] = path
        tree = ast.parse(path.read_bytes(), filename=str(path))
        strings = _strings(tree)
        for data in _named_files(path.parent, strings):
            files[f"{name}:{data.relative_to(path.parent)}"] = data
        for reached in _imported(tree, name, path, modules) | _loaded(tree, strings, name, modules):
            waiting += [(part, modules[part]) for part in _with_parents(reached) if part in modules]
    return files


def package_roots() -> dict[str, Path]:
    """The directory of each project package, wherever it is installed."""
    roots = {}
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            roots[package] = Path(next(iter(spec.submodule_search_locations))).resolve()
    return roots


def _configs(names: Iterable[str]) -> dict[str, Path]:
    files = {}
    for name in names:
        path = file_of(*name.removesuffix(".yaml").split("/"))
        if path is None:
            raise UsageError(f"a gate composes {name!r}, but conf/ has no such file")
        files[f"conf:{name.removesuffix('.yaml')}"] = path
    return files


def _all_modules(roots: Mapping[str, Path]) -> dict[str, Path]:
    modules = {}
    for package, root in roots.items():
        for path in root.rglob("*.py"):
            parts = [package, *path.relative_to(root).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            modules[".".join(parts)] = path
    return modules


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _imported(tree: ast.AST, name: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Project modules of the import statements, at any depth of the file."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    reached = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            reached |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            reached.add(base)
            names = [alias.name for alias in node.names]
            if "*" in names:
                names = []
            reached |= {f"{base}.{each}" for each in names}
    return {each for each in reached if each in modules}


def _loaded(tree: ast.AST, strings: set[str], name: str, modules: dict[str, Path]) -> set[str]:
    """Project modules that the file may load by name."""
    called = {_called(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    reached = set()
    if called & {"import_module", "__import__"}:
        reached |= {each for each in strings if each in modules}
        for pattern in _patterns(tree, name):
            reached |= {each for each in modules if pattern.fullmatch(each)}
    if called & {"iter_modules", "walk_packages"}:
        package = (
            name if modules.get(name, Path()).name == "__init__.py" else name.rpartition(".")[0]
        )
        reached |= {each for each in modules if each.startswith(f"{package}.")}
    return reached


def _called(node: ast.Call) -> str:
    function = node.func
    return getattr(function, "attr", getattr(function, "id", ""))


def _patterns(tree: ast.AST, name: str) -> list[re.Pattern]:
    """F-strings that begin with a project package, each hole one part of a dotted name."""
    patterns = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        parts = [_text_of(part, name) for part in node.values]
        if parts[0] is not None and parts[0].split(".")[0] in PACKAGES:
            texts = (r"\w+" if part is None else re.escape(part) for part in parts)
            patterns.append(re.compile("".join(texts)))
    return patterns


def _text_of(part: ast.expr, name: str) -> str | None:
    """What a part of an f-string of the module `name` stands for, None when it may be anything."""
    if isinstance(part, ast.Constant):
        return part.value
    hole = part.value
    return name if isinstance(hole, ast.Name) and hole.id == "__name__" else None


def _strings(tree: ast.AST) -> set[str]:
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200
    }


def _named_files(directory: Path, strings: set[str]) -> list[Path]:
    """Files that a string names, in the directory or in a subdirectory that a string names."""
    names = [each for each in strings if re.fullmatch(r"[\w./-]+", each) and ".." not in each]
    places = [directory, *(directory / each for each in names if (directory / each).is_dir())]
    found = {
        place / each
        for place in places
        for each in names
        if not each.startswith("/")
        and Path(each).suffix not in ("", ".py", ".md")
        and (place / each).is_file()
    }
    return sorted(found)
