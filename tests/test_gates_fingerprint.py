"""A gate's fingerprint changes with the code that it measures, and with nothing else."""

import ast

import pytest

from gates.judging.find import HERE, find_gates
from gates.judging.fingerprint import (
    code_fingerprint,
    import_closure,
    package_roots,
    read_source,
    walking_once,
)
from xtrain.errors import UsageError

FILES = {
    "gates/__init__.py": "",
    "gates/t1_line.py": "from xtrain.nn import layer\n\ndef f():\n    import xtrain.engine.tape\n",
    "xtrain/__init__.py": "",
    "xtrain/README.md": "# notes\n",
    "xtrain/nn/__init__.py": "",
    "xtrain/nn/layer.py": "from . import norm\nfrom ..engine.device import use\n",
    "xtrain/nn/norm.py": 'SOURCE = "norm.cu"\n',
    "xtrain/nn/norm.cu": "__global__ void norm() {}\n",
    "xtrain/nn/unused.py": "",
    "xtrain/engine/__init__.py": "",
    "xtrain/engine/tape.py": "import json\n",
    "xtrain/engine/device.py": (
        "import importlib\n"
        'def use(name):\n    return importlib.import_module({"cpu": "xtrain.cpu"}[name])\n'
    ),
    "xtrain/cpu/__init__.py": (
        "from importlib import import_module\n"
        'def load(op):\n    return import_module(f"{__name__}.{op}")\n'
    ),
    "xtrain/cpu/linear.py": "",
    "xtrain/data/__init__.py": (
        "import pkgutil\nnames = [m.name for m in pkgutil.iter_modules(__path__)]\n"
    ),
    "xtrain/data/shards.py": "",
}
REACHED = {
    "gates",
    "gates.t1_line",
    "xtrain",
    "xtrain.nn",
    "xtrain.nn.layer",
    "xtrain.nn.norm",
    "xtrain.nn.norm:norm.cu",
    "xtrain.engine",
    "xtrain.engine.tape",
    "xtrain.engine.device",
    "xtrain.cpu",
    "xtrain.cpu.linear",
}


@pytest.fixture
def project(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def roots(project):
    return {name: project / name for name in ("gates", "xtrain")}


def fingerprint(project, device="cpu"):
    return code_fingerprint(project / "gates" / "t1_line.py", roots=roots(project), device=device)


def test_the_closure_follows_imports_and_modules_loaded_by_name(project):
    found = import_closure(project / "gates" / "t1_line.py", roots(project))
    assert set(found) - {"gates"} == REACHED - {"gates"}


def test_a_change_of_a_cpu_kernel_leaves_a_gpu_s_verdict_as_it_is(project):
    before = fingerprint(project, "cuda")
    (project / "xtrain" / "cpu" / "linear.py").write_text("# changed\n")
    assert fingerprint(project, "cuda") == before


def test_unless_the_gate_measures_on_the_cpu_too(project):
    gate = project / "gates" / "t1_line.py"
    gate.write_text(gate.read_text() + '\nDEVICES = ("cpu", "cuda")\n')
    before = fingerprint(project, "cuda")
    (project / "xtrain" / "cpu" / "linear.py").write_text("# changed\n")
    assert fingerprint(project, "cuda") != before


def test_a_program_that_a_gate_starts_counts_with_all_that_it_imports(project):
    """A Python of its own shows in no import: `-m NAME`, and the imports of `-c PROGRAM`."""
    (project / "gates" / "child.py").write_text("import sys\nPYTHON = sys.executable\n")
    (project / "xtrain" / "nn" / "__main__.py").write_text("import xtrain.data.shards\n")
    gate = project / "gates" / "t1_line.py"
    gate.write_text('run("-m", "xtrain.nn")\nrun("-c", "from xtrain.nn import unused")\n')
    started = {"xtrain.nn.__main__", "xtrain.data.shards", "xtrain.nn.unused"}
    assert not started & set(import_closure(gate, roots(project)))
    gate.write_text("from gates.child import run\n" + gate.read_text())
    assert started <= set(import_closure(gate, roots(project)))


def test_the_first_gate_hangs_on_the_command_that_it_runs():
    found = import_closure(find_gates()["t1"].path)
    assert {"pipelines.__main__", "pipelines.run", "xtrain.config.compose"} <= set(found)
    assert "gates.instruments.simulated_kernels" in found


def test_a_listing_of_all_gates_parses_every_file_once(monkeypatch):
    parsed = []
    sound = ast.parse
    read_source.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(ast, "parse", lambda text: parsed.append(text) or sound(text))
        for device in ("cpu", "cuda"):
            for file in find_gates().values():
                code_fingerprint(file.path, device=device)
    assert 100 < len(parsed) == len(set(parsed))


def test_a_package_that_loads_all_its_modules_counts_whole(project):
    (project / "gates" / "t1_line.py").write_text("import xtrain.data\n")
    assert "xtrain.data.shards" in import_closure(project / "gates/t1_line.py", roots(project))


@pytest.mark.parametrize(
    "name", ["gates/t1_line.py", "xtrain/nn/norm.py", "xtrain/nn/norm.cu", "xtrain/cpu/linear.py"]
)
def test_a_change_to_what_is_reached_changes_the_fingerprint(project, name):
    before = fingerprint(project)
    (project / name).write_text((project / name).read_text() + "\n# changed\n")
    assert fingerprint(project) != before


@pytest.mark.parametrize(
    "name", ["xtrain/README.md", "xtrain/nn/unused.py", "xtrain/data/shards.py"]
)
def test_a_change_elsewhere_stales_nothing(project, name):
    before = fingerprint(project)
    (project / name).write_text("# changed\n")
    assert fingerprint(project) == before


def test_the_fingerprint_does_not_depend_on_where_the_project_is(project, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in FILES:
        (elsewhere / name).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / name).write_text(FILES[name])
    assert fingerprint(elsewhere) == fingerprint(project)


def test_composed_configs_are_part_of_it(project, tmp_path, monkeypatch):
    conf = tmp_path / "conf"
    (conf / "model").mkdir(parents=True)
    (conf / "config.yaml").write_text("")
    (conf / "model" / "own.yaml").write_text("hidden_size: 32\n")
    monkeypatch.setenv("XTRAIN_CONF", str(conf))
    gate = project / "gates" / "t1_line.py"

    before = code_fingerprint(gate, ("model/own",), roots(project), device="cpu")
    (conf / "model" / "own.yaml").write_text("hidden_size: 64\n")

    assert code_fingerprint(gate, ("model/own.yaml",), roots(project), device="cpu") != before
    with pytest.raises(UsageError, match="model/v99"):
        code_fingerprint(gate, ("model/v99",), roots(project), device="cpu")


def test_a_config_of_the_package_is_the_package_s_whatever_directory_is_named(
    project, tmp_path, monkeypatch
):
    gate = project / "gates" / "t1_line.py"
    before = code_fingerprint(gate, ("model/v0",), roots(project), device="cpu")
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "config.yaml").write_text("")
    (tmp_path / "conf" / "model" / "v0.yaml").write_text("hidden_size: 8\n")
    monkeypatch.setenv("XTRAIN_CONF", str(tmp_path / "conf"))
    assert code_fingerprint(gate, ("model/v0",), roots(project), device="cpu") == before


def test_every_gate_of_the_project_has_a_fingerprint_of_project_files_only():
    inside = tuple(package_roots().values())
    for file in find_gates(HERE).values():
        closure = import_closure(file.path)
        assert f"gates.{file.path.stem}" in closure
        assert all(any(path.is_relative_to(root) for root in inside) for path in closure.values())
        assert not any(path.suffix == ".md" for path in closure.values())


@pytest.mark.parametrize("folder", ["cpu", "cuda/kernels"])
def test_every_kernel_is_part_of_what_the_gates_of_the_engine_judge(folder):
    kernels = set((package_roots()["xtrain"] / folder).glob("*.py"))
    for name in ("t4", "t5", "t6"):
        assert kernels <= set(import_closure(find_gates(HERE)[name].path).values())


def test_a_closure_that_is_walked_once_is_the_same_and_forgotten_afterwards():
    gate = find_gates()["t1"].path
    found = import_closure(gate)
    with walking_once():
        assert import_closure(gate) == import_closure(gate) == found
        import_closure(gate).clear()  # the caller's own
        assert import_closure(gate) == found
    assert import_closure(gate) == found
