"""Ways to a promotion that was not earned: by accident or by trick, each is refused."""

import json
import shutil
from pathlib import Path

import pytest

import gates.trained_run
from gates.judging.fingerprint import code_fingerprint
from gates.judging.outlook import outlook
from pipelines.__main__ import main
from xtrain.config.bars import (
    for_data,
    gate_checks,
    is_of_loss,
    known_data,
    official,
    run_gate,
    whose_bars,
)
from xtrain.config.compose import compose, load_run
from xtrain.config.files import choices, conf_dir, package_conf_dir
from xtrain.data.dataset import DataConfig, data_fingerprint, prepare
from xtrain.errors import UsageError
from xtrain.track.mlflow_store import open_store
from xtrain.track.store_address import store_uri

TESTS = Path(__file__).parent / "conf"
TEXT = "".join(
    f"The people of county {i} sent {i * 7 % 31} letters to the Senate in {1800 + i}.\n"
    for i in range(400)
)
EASY = "The same words, again and again. " * 2000
RUNS = choices("run")


@pytest.fixture
def tiny(here):
    """A working directory with two texts and a run `tiny` whose bar is of the first one."""
    (here / "text.txt").write_text(TEXT)
    (here / "easy.txt").write_text(EASY)
    shutil.copytree(TESTS, here / "conf")
    bind(here, "tiny", "- {name: val_loss, op: '<=', bar: 10.8, data: letters}")
    return here


def bind(here: Path, name: str, checks: str) -> None:
    """Give the run's file a gate with these checks and what `letters` are."""
    file = here / "conf" / "run" / f"{name}.yaml"
    head = file.read_text().partition("gate:")[0]
    run = load_run(compose(["run=tiny", "data.path=text.txt"], config_dir=str(TESTS)))
    known = f"{{name: letters, source: text, fingerprint: {data_fingerprint(run.data)}}}"
    file.write_text(f"{head}gate:\n  requires: []\n  data: [{known}]\n  checks:\n  {checks}\n")


def xtrain(*overrides: str, run: str = "tiny") -> int:
    fixed = ["--config-dir", "conf", f"run={run}", "device=cpu"]
    if not any(each.startswith("data.path=") for each in overrides):
        fixed.append("data.path=text.txt")
    return main([*fixed, *overrides])


def run_directories(here: Path, run: str = "tiny") -> list[Path]:
    return sorted(p.parent for p in here.glob(f"outputs/{run}/*/*/manifest.json"))


def alias(name: str = "xtrain-tiny") -> str:
    return str(open_store(store_uri()).get_model_version_by_alias(name, "promoted").version)


# a bar is of its data, whatever they are called


def test_the_name_of_the_data_decides_nothing(tiny, capsys):
    assert xtrain("data.name=foo") == 0
    assert "promoted as models:/xtrain-tiny@promoted" in capsys.readouterr().out


@pytest.mark.parametrize(
    "other", ["data.path=easy.txt", "data.max_bytes=9000", "data.order_seed=5"]
)
def test_other_data_under_the_same_name_are_judged_and_not_promoted(tiny, capsys, other):
    assert xtrain("data.name=letters", other) == 3
    shown = capsys.readouterr()
    assert "will not be promoted, because run tiny has no bar on a loss" in shown.err
    assert "REFUSED: run tiny has no bar on a loss of these data" in shown.out
    assert shown.err.index("will not be promoted") < shown.err.index("run directory")


def test_easy_text_under_the_name_of_the_speeches_meets_no_bar_of_v0(here):
    (here / "easy.txt").write_text(EASY)
    overrides = ["data.source=text", "data.path=easy.txt", "data.name=sotu"]
    run = load_run(compose(["run=v0", *overrides]))
    assert any("no bar on a loss" in reason for reason in outlook(run))
    assert outlook(load_run(compose(["run=v0", "data.name=foo"]))) == []


@pytest.mark.parametrize("name", RUNS)
def test_every_bar_on_a_loss_of_the_package_is_of_known_data(name):
    gate = run_gate(official(name))
    known = {each.name for each in gate.data}
    assert {check.data for check in gate.checks if is_of_loss(check)} == known
    own = official(name).data
    assert known_data(gate, own.source, data_fingerprint(own)) is not None


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_bars_on_what_a_loss_takes_for_granted(name):
    gate = run_gate(official(name))
    train = official(name).train
    for known in gate.data:
        bars = {c.name: c for c in for_data(gate.checks, known.name)}
        assert bars["trained_tokens"].bar == train.total_steps * train.tokens_per_step
        assert bars["heldout_tokens"].bar <= train.eval_tokens
        assert bars["changed_terms"].bar == bars["export_differing_tensors"].bar == 0


def test_v6_to_v10_are_judged_on_the_fixed_set_by_the_original_s_figures():
    figures = {"v6": 3.2328, "v7": 3.1850, "v8": 3.1515, "v9": 2.9278, "v10": 2.8814}
    found = {
        name: check.bar for name in RUNS for check in gate_checks(name)[0] if check.set == "eval_v1"
    }
    assert found == figures


def test_a_check_of_data_that_its_file_does_not_state_is_refused(tiny):
    bind(tiny, "tiny", "- {name: val_loss, op: '<=', bar: 10.8, data: leters}")
    assert xtrain("dry_run=true") == 2


# what a bar takes for granted


@pytest.mark.parametrize(
    "override",
    [
        "train.max_tokens=7200000",
        "train.eval_tokens=64",
        "train.seq_len=32",
        "model.num_hidden_layers=5",
        "data.respect_documents=true",
        "init_from=somewhere",
        "features.qk_norm=false",
    ],
)
def test_a_changed_term_is_said_before_the_first_step(override):
    key = override.partition("=")[0]
    (reason,) = outlook(load_run(compose(["run=v0", override])))
    assert reason == f"{key}: not as in the run's file"


def test_what_is_free_to_vary_is_no_changed_term():
    free = ["seed=3", "optim.lr=1e-3", "train.dropout=0.1", "device=cpu", "train.keep_last=1"]
    assert outlook(load_run(compose(["run=v0", *free]))) == []


def test_a_missing_gate_is_said_by_a_dry_run_and_refuses_at_the_end(tiny, capsys):
    file = tiny / "conf" / "run" / "tiny.yaml"
    file.write_text(file.read_text().replace("requires: []", "requires: [T99]"))
    assert xtrain("dry_run=true") == 0
    said = "will not be promoted, because gate T99 is required and there is no such gate yet"
    assert said in capsys.readouterr().out
    assert xtrain() == 3
    assert "REFUSED: gate T99 is required and there is no such gate yet" in capsys.readouterr().out


def test_an_export_that_is_not_the_checkpoint_is_refused(tiny, capsys):
    from gates.trained_run import measure_run

    assert xtrain() == 0
    (path,) = run_directories(tiny)
    sound = measure_run(path, "cpu", tiny / "outputs")
    assert sound["export_differing_tensors"] == 0
    learnt = sound["unigram_nats"] - sound["val_loss"]
    assert sound["margin_over_unigram_nats"] == learnt
    assert sound["trained_tokens"] == 1920
    spoil_export(path)
    found = measure_run(path, "cpu", tiny / "outputs")["export_differing_tensors"]
    assert (found, found.why) == (1, "model.norm.weight")


def spoil_export(path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    weights = load_file(path / "export" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    save_file(weights, path / "export" / "model.safetensors", metadata={"format": "pt"})


def test_a_run_directory_that_says_another_config_than_the_checkpoint_is_found(tiny):
    from gates.trained_run import measure_run

    assert xtrain("promote=false") == 0
    (path,) = run_directories(tiny)
    file = path / "config.yaml"
    file.write_text(file.read_text().replace("lr: 0.01", "lr: 0.02"))
    found = measure_run(path, "cpu", tiny / "outputs")["changed_terms"]
    assert (found, found.why) == (1, "the checkpoint's config")


def test_prepared_shards_that_are_not_those_of_their_manifest_are_refused(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    cfg = DataConfig("letters", "text", str(tmp_path / "text.txt"))
    found = prepare(cfg, cache_dir=tmp_path / "cache")
    manifest = found.train_path.parent / "manifest.json"
    manifest.write_text(manifest.read_text().replace(found.heldout.sha256, found.train.sha256))
    with pytest.raises(UsageError, match="not of these shards"):
        prepare(cfg, cache_dir=tmp_path / "cache")


# the ledger decides, each time


def test_a_registry_file_in_a_refused_run_moves_no_alias(tiny):
    assert xtrain() == 0
    bind(tiny, "unreachable", "- {name: val_loss, op: '<=', bar: 1, data: letters}")
    file = tiny / "conf" / "run" / "unreachable.yaml"
    file.write_text(file.read_text().replace("_self_\n", "_self_\nname: tiny\n", 1))
    assert xtrain("seed=1", run="unreachable") == 3
    (refused,) = [p for p in run_directories(tiny) if not (p / "registry.json").exists()]
    tags = {"xtrain.verdict": "PASS"}
    owed = {"name": "xtrain-tiny", "tags": tags, "version": None}
    (refused / "registry.json").write_text(json.dumps(owed))

    assert xtrain("seed=2", "promote=false") == 0

    assert alias() == "1"
    assert json.loads((refused / "registry.json").read_text())["version"] is None


# bars of the package come from the package


@pytest.fixture
def edited_conf(tmp_path, monkeypatch):
    """XTRAIN_CONF names a copy of conf/ in which v0 has no bar worth the name, and half a model."""
    copy = tmp_path / "conf"
    shutil.copytree(package_conf_dir(), copy)
    v0 = copy / "run" / "v0.yaml"
    v0.write_text(v0.read_text().replace("bar: 1.23", "bar: -9"))
    (copy / "run" / "mine.yaml").write_text(v0.read_text().replace("name: v0", "name: mine"))
    model = copy / "model" / "v0.yaml"
    model.write_text(model.read_text().replace("num_hidden_layers: 4", "num_hidden_layers: 2"))
    monkeypatch.setenv("XTRAIN_CONF", str(copy))
    return copy


def margin_bar(checks) -> float:
    return next(c.bar for c in checks if c.name == "margin_over_unigram_nats")


def test_an_edited_copy_of_conf_lowers_no_bar_of_the_package(edited_conf):
    run = load_run(compose(["run=v0"]))
    assert conf_dir() == edited_conf and run.gate.checks
    assert margin_bar(run.gate.checks) == -9
    assert margin_bar(run_gate(run).checks) == margin_bar(gate_checks("v0")[0]) == 1.23
    assert whose_bars(run) == "of the package, conf/run/v0.yaml"
    assert outlook(run) == ["model.num_hidden_layers: not as in the run's file"]


def test_a_run_of_an_own_conf_is_judged_by_its_file_and_says_so(edited_conf):
    run = load_run(compose(["run=mine"]))
    assert margin_bar(run_gate(run).checks) == -9
    assert whose_bars(run) == f"of one's own, {edited_conf / 'run' / 'mine.yaml'}"


def test_a_further_directory_cannot_stand_in_for_a_run_of_the_package(tmp_path):
    (tmp_path / "run").mkdir()
    own = (package_conf_dir() / "run" / "v8.yaml").read_text()
    own = own.replace("parent: v6\naxes: [model]\n", "").replace("bar: 2.98", "bar: 99")
    (tmp_path / "run" / "mine.yaml").write_text(own.replace("2_360_000_000", "9_360_000_000"))
    run = load_run(compose(["run=mine"], config_dir=str(tmp_path)))
    assert [c.bar for c in run_gate(run).checks if c.name == "val_loss"] == [2.98]
    assert outlook(run)[0] == "train.max_tokens, parent, axes: not as in the run's file"


@pytest.mark.parametrize("name", ["V0", "../v0", "", "v0@promoted"])
def test_a_name_that_would_pass_for_another_is_refused(tmp_path, name):
    (tmp_path / "run").mkdir()
    text = (package_conf_dir() / "run" / "v0.yaml").read_text()
    (tmp_path / "run" / "mine.yaml").write_text(text.replace("name: v0", f"name: '{name}'"))
    with pytest.raises(UsageError, match="name="):
        load_run(compose(["run=mine"], config_dir=str(tmp_path)))


def test_the_verdict_says_whose_bars_they_were(tiny, capsys):
    assert xtrain() == 0
    assert "bars of one's own, with the run" in capsys.readouterr().out
    lines = (tiny / "outputs" / "ledger.jsonl").read_text().splitlines()
    assert {json.loads(line)["bars"] for line in lines} == {"of one's own, with the run"}


def test_the_verdict_on_a_run_without_a_file_here_is_bound_to_code_config_data_and_weights(tiny):
    assert xtrain() == 0
    lines = (tiny / "outputs" / "ledger.jsonl").read_text().splitlines()
    verdict, promotion = (json.loads(line) for line in lines)
    assert (verdict["kind"], promotion["kind"]) == ("verdict", "promotion")
    assert verdict["fingerprint"] == promotion["fingerprint"]
    assert set(verdict["fingerprint"]) == {"code", "config", "data", "checkpoint", "export"}
    judged_by = Path(gates.trained_run.__file__)
    assert verdict["fingerprint"]["code"] == code_fingerprint(judged_by, device="cpu")
