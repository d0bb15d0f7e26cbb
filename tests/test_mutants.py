"""The table of mutants: every line is there to be replaced, and the run of one tells right."""

from pathlib import Path

import pytest
from mutants.__main__ import ROOT
from mutants.mutant import Mutant
from mutants.results import CAUGHT, NO_CONTROL, SURVIVED, Results
from mutants.sandbox import Sandbox
from mutants.table import MUTANTS
from mutants.write_table import write_table


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name[:60])
def test_the_line_of_a_mutant_stands_once_in_its_file(mutant):
    text = (ROOT / mutant.file).read_text()
    assert mutant.apply(text) != text
    assert (ROOT / mutant.test.partition("::")[0].partition(" -k ")[0]).is_file()


def test_there_are_at_least_sixty_and_each_is_another():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "root"
    for name in ("xtrain", "gates", "pipelines", "benchmarks", "conf", "tests"):
        (root / name).mkdir(parents=True)
    (root / "pyproject.toml").write_text("")
    # Without it the package would be a namespace, which an installed one of its name goes before.
    (root / "xtrain" / "__init__.py").write_text("")
    (root / "xtrain" / "line.py").write_text("def double(x):\n    return 2 * x\n")
    test = "from xtrain.line import double\n\ndef test_it():\n    assert double({}) == {}\n"
    (root / "tests" / "test_good.py").write_text(test.format(3, 6))
    (root / "tests" / "test_blind.py").write_text(test.format(2, 4))
    (root / "tests" / "test_red.py").write_text(test.format(2, 5))
    return root


@pytest.mark.parametrize(
    ("test", "verdict"), [("good", CAUGHT), ("blind", SURVIVED), ("red", NO_CONTROL)]
)
def test_a_mutant_is_caught_survives_or_has_no_control(project, tmp_path, test, verdict):
    mutant = Mutant("xtrain/line.py", "2 * x", "x + 2", f"tests/test_{test}.py::test_it")
    sandbox = Sandbox(project, tmp_path / "copy" / "project", 60)
    assert sandbox.verdict(mutant, "test") == verdict
    assert (project / mutant.file).read_text() == (sandbox.place / mutant.file).read_text()


def test_a_result_is_kept_until_a_file_that_it_rests_on_changes(project, tmp_path):
    mutant = Mutant("xtrain/line.py", "2 * x", "x + 2", "tests/test_good.py")
    Results(project, tmp_path / "r.json").add(mutant, "test", CAUGHT)
    assert Results(project, tmp_path / "r.json").of(mutant) == {"test": CAUGHT}
    write_table(tmp_path / "t.md", [mutant], Results(project, tmp_path / "r.json"))
    write_table(tmp_path / "t.md", [mutant], Results(project, tmp_path / "r.json"))
    assert Path(tmp_path / "t.md").read_text().count("| caught |") == 1
    (project / "tests" / "test_good.py").write_text("# changed\n")
    assert Results(project, tmp_path / "r.json").of(mutant) == {}
