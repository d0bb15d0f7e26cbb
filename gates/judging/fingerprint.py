"""The code fingerprint of a gate: sha256 over what its measurement imports and composes.

The import closure is found by walking syntax trees, without importing anything, and is restricted
to the project's packages: a gate that does not import `xtrain.data` is not made stale by a change
there, and a README edit stales nothing. Four things that plain imports do not show are followed:

- `import_module` by name: every string in such a file that is a project module counts, and an
  f-string counts as a pattern (`f"xtrain.cpu.{name}"` is every module of `xtrain/cpu`, and so is
  `f"{__name__}.{name}"` in its own file);
- packages that load all their modules (`pkgutil.iter_modules`, `walk_packages`);
- a Python that it starts: in a file that names `sys.executable`, or imports one that does, every
  string that is a project module counts, with its `__main__`, and every string that is a program
  counts by its imports;
- data files beside the code (CUDA C++ sources, golden arrays) that it names in a string.
"""

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

from xtrain.config.files import file_of
from xtrain.errors import UsageError

PACKAGES = ("xtrain", "pipelines", "gates", "benchmarks", "peers")
CPU_KERNELS = "xtrain.cpu."


OWN_NAME = "{__name__}"  # in an f-string's parts: the name of the module that it stands in


@dataclass(frozen=True)
class Source:
    """What the syntax tree of one file says, wherever the file is.

    imports: (level, module, names) of its import statements. strings: constants. calls: names that
    are called. formatted: the parts of its f-strings, None for what may be anything. starts_python:
    whether it names `sys.executable`.
    """

    imports: tuple[tuple[int, str, tuple[str, ...]], ...]
    strings: frozenset[str]
    calls: frozenset[str]
    formatted: tuple[tuple[str | None, ...], ...]
    starts_python: bool

    @cached_property
    def names(self) -> list[str]:
        """Strings that may name a file or a directory beside this one."""
        return [s for s in self.strings if re.fullmatch(r"[\w./-]+", s) and ".." not in s]

    @cached_property
    def data_names(self) -> list[str]:
        """Those that may name a file of data."""
        other = ("", ".py", ".md")
        return [s for s in self.names if s[0] != "/" and Path(s).suffix not in other]


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
    if device == "cuda" and "cpu" not in read_source(gate_file.read_bytes()).strings:
        closure = {n: path for n, path in closure.items() if not n.startswith(CPU_KERNELS)}
    return hash_files({**closure, **_configs(composes)})


def hash_files(files: dict[str, Path]) -> str:
    """Hex sha256 over (name, content) in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name}\0{hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


_walked: ContextVar[dict | None] = ContextVar("walked", default=None)


@contextmanager
def walking_once() -> Iterator[None]:
    """Within, each file's closure is walked once: a listing asks for it by gate and by device."""
    token = _walked.set({})
    try:
        yield
    finally:
        _walked.reset(token)


def import_closure(start: Path, roots: Mapping[str, Path] | None = None) -> dict[str, Path]:
    """Every project file that `start` reaches, by a name that does not depend on the machine."""
    known = _walked.get()
    if known is None or roots is not None:
        return _walk(start, roots)
    if start not in known:
        known[start] = _walk(start, None)
    return dict(known[start])


def _walk(start: Path, roots: Mapping[str, Path] | None) -> dict[str, Path]:
    modules = _all_modules(package_roots() if roots is None else roots)
    by_path = {path: name for name, path in modules.items()}
    start = start.resolve()
    sources = _Sources()
    files: dict[str, Path] = {}
    waiting = [(by_path.get(start, f"gates.{start.stem}"), start)]
    while waiting:
        name, path = waiting.pop()
        if name in files:
            continue
        files[name] = path
        source = sources[path]
        for data in _named_files(path.parent, source):
            files[f"{name}:{data.relative_to(path.parent)}"] = data
        imported = _imported(source, name, path, modules)
        reached = imported | _loaded(source, name, modules)
        if source.starts_python or any(sources[modules[each]].starts_python for each in imported):
            reached |= _started(source, modules)
        for each in reached:
            waiting += [(part, modules[part]) for part in _with_parents(each) if part in modules]
    return files


class _Sources(dict):
    """What each file says; read from the disk once a walk."""

    def __missing__(self, path: Path) -> Source:
        return self.setdefault(path, read_source(path.read_bytes()))


@cache
def read_source(content: bytes) -> Source:
    """What a file of this content says; parsed once, however many gates reach it."""
    imports, strings, calls, formatted = [], set(), set(), []
    starts_python = False
    for node in ast.walk(ast.parse(content)):
        match node:
            case ast.Import():
                imports += [(0, alias.name, ()) for alias in node.names]
            case ast.ImportFrom():
                names = tuple(alias.name for alias in node.names if alias.name != "*")
                imports.append((node.level, node.module or "", names))
            case ast.Constant(value=str()) if len(node.value) < 200:
                strings.add(node.value)
            case ast.JoinedStr():
                formatted.append(tuple(_text_of(part) for part in node.values))
            case ast.Call():
                calls.add(getattr(node.func, "attr", getattr(node.func, "id", "")))
            case ast.Attribute(value=ast.Name(id="sys"), attr="executable"):
                starts_python = True
    return Source(
        tuple(imports), frozenset(strings), frozenset(calls), tuple(formatted), starts_python
    )


def _text_of(part: ast.expr) -> str | None:
    """What a part of an f-string stands for, None when it may be anything."""
    if isinstance(part, ast.Constant):
        return part.value
    hole = part.value
    return OWN_NAME if isinstance(hole, ast.Name) and hole.id == "__name__" else None


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


def _imported(source: Source, name: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Project modules of the import statements, at any depth of the file."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    reached = set()
    for level, base, names in source.imports:
        if level:
            above = package.split(".")[: len(package.split(".")) - level + 1]
            base = ".".join([*above, base] if base else above)
        reached.add(base)
        reached |= {f"{base}.{each}" for each in names}
    return {each for each in reached if each in modules}


def _loaded(source: Source, name: str, modules: dict[str, Path]) -> set[str]:
    """Project modules that the file may load by name."""
    reached = set()
    if source.calls & {"import_module", "__import__"}:
        reached |= {each for each in source.strings if each in modules}
        for pattern in _patterns(source, name):
            reached |= {each for each in modules if pattern.fullmatch(each)}
    if source.calls & {"iter_modules", "walk_packages"}:
        package = (
            name if modules.get(name, Path()).name == "__init__.py" else name.rpartition(".")[0]
        )
        reached |= {each for each in modules if each.startswith(f"{package}.")}
    return reached


def _started(source: Source, modules: Mapping[str, Path]) -> set[str]:
    """Project modules that the file may give to a Python of its own: `-m NAME`, `-c "import ..."`.

    `python -m package` runs its `__main__`.
    """
    named = {each for each in source.strings if each in modules}
    reached = named | {f"{each}.__main__" for each in named}
    for text in source.strings:
        if "import " in text:
            reached |= _imported(_read_program(text), "", Path(), modules)
    return {each for each in reached if each in modules}


@cache
def _read_program(text: str) -> Source:
    """What a string says if it is Python, else nothing."""
    try:
        return read_source(text.encode())
    except SyntaxError:
        return read_source(b"")


def _patterns(source: Source, name: str) -> list[re.Pattern]:
    """F-strings that begin with a project package, each hole one part of a dotted name."""
    patterns = []
    for parts in source.formatted:
        known = [name if part == OWN_NAME else part for part in parts]
        if known[0] is not None and known[0].split(".")[0] in PACKAGES:
            texts = (r"\w+" if part is None else re.escape(part) for part in known)
            patterns.append(re.compile("".join(texts)))
    return patterns


def _named_files(directory: Path, source: Source) -> list[Path]:
    """Files that a string names, in the directory or in a subdirectory that a string names."""
    if not source.data_names:
        return []
    places = [directory, *(p for each in source.names if (p := directory / each).is_dir())]
    found = {p for place in places for each in source.data_names if (p := place / each).is_file()}
    return sorted(found | {header for path in found for header in _headers(path)})


def _headers(path: Path) -> list[Path]:
    """Files beside a CUDA C++ source that it includes."""
    if path.suffix != ".cu":
        return []
    named = re.findall(r'^#include "([\w.]+)"$', path.read_text(), re.MULTILINE)
    return [path.parent / each for each in named if (path.parent / each).is_file()]
