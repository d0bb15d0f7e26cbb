"""The command line: exit codes, one line an error, nothing written."""

import os
import shlex
import subprocess
import sys

import pytest

from pipelines.__main__ import main
from xtrain.command.ending import guarded
from xtrain.config.compose import compose, load_run
from xtrain.errors import Interrupted, UsageError

BAD = [
    (["run=nope"], "run=nope: there is no such run", "v0, v1, v2"),
    (["run=v99"], "nearest: v9", "choose one of v0"),
    (["phase=t22"], "phase=t22: there is no such phase", "nearest: t2"),
    (["data=tinystory"], "nearest: tinystories", "sotu"),
    (["model=v5"], "model=v5: there is no such model", "nearest: v"),
    (["sed=3"], "no key sed", "nearest: seed"),
    (["model.hiden_size=64"], "no key model.hiden_size", "nearest: model.hidden_size"),
    (["trian.max_tokens=5"], "no key trian.max_tokens", "nearest: train.max_tokens"),
    (["lr=1e-3"], "no key lr", "nearest: optim.lr"),
    (["+model.extra=3"], "no key model.extra", "model.head_dim"),
    (["++train.max_token=3"], "no key train.max_token", "nearest: train.max_tokens"),
    (["+foo=1"], "no key foo", "xtrain --cfg job"),
    (["+seed=4"], "+seed", "leave out the +"),
    (["~seed"], "~seed", "every key has a value"),
    (["train.max_tokens=many"], "train.max_tokens=many", "must be a whole number"),
    (["train.max_tokens=1.5"], "train.max_tokens=1.5", "must be a whole number"),
    (["optim.lr=fast"], "optim.lr=fast", "must be a number"),
    (["promote=perhaps"], "promote=perhaps", "must be true or false"),
    (["seed=null"], "seed=null", "cannot be null"),
    (["train=5"], "train=5", "set them one by one"),
    (["seed=1,2"], "seed=1,2", "add -m"),
    (["seed=range(3)"], "seed=range(3)", "add -m"),
    (["data.source=txt"], "data.source=txt", "nearest: text"),
    (["+@ata.name=[1,2]"], "cannot read this", ""),
    (["train"], "'train' is not KEY=VALUE", ""),
    (["=3"], "'=3' is not KEY=VALUE", ""),
    (["seed=[1"], "cannot read 'seed=[1'", "quote"),
    (["out=${nope}"], "out", "'nope' not found"),
    (["out="], "out is empty", ""),
    ([f"out={'x' * 5000}"], "(5,000 characters)", "longer than 255 bytes"),
    ([f"out={'x/' * 2500}"], "(5,000 characters)", "longer than 3584 bytes"),
    (["device=gpu"], "device=gpu", "choose one of auto, cpu, cuda"),
    (["launch=threds"], "launch=threds", "choose one of single"),
    (["optim.schedule=cosin"], "optim.schedule=cosin", "nearest: cosine"),
    (["features.remat=all"], "features.remat=all", "none, mlp, block"),
    (["model.num_key_value_heads=3"], "model.num_attention_heads=2", "num_key_value_heads=3"),
    (["model.head_dim=7"], "model.head_dim=7", "odd"),
    (["train.seq_len=999"], "train.seq_len=999", "model.max_position_embeddings=256"),
    (["train.max_tokens=100"], "train.max_tokens=100", "train.batch_size=8"),
    (["train.eval_tokens=8"], "train.eval_tokens=8", "train.seq_len=64"),
    (["optim.warmup_steps=9999"], "optim.warmup_steps=9999", "train.max_tokens=720000"),
    (["train.accumulation=0"], "train.accumulation=0", "below 1"),
    (["train.batch_size=-8"], "train.batch_size=-8", "below 1"),
    (["train.dropout=1"], "train.dropout=1.0", "above 0.999"),
    (["optim.lr=nan"], "optim.lr=nan", "is below 0"),
    (["seed=-1"], "seed=-1", "below 0"),
    (["data=text"], "data=text needs data.path=", ""),
    (["phase.checks=[]"], "phase.checks stands in the phase's file", ""),
    (["gate.checks=[]"], "gate.checks stands in the run's file", ""),
    (["gate.requires=[]"], "gate.requires stands in the run's file", ""),
    (["gate={checks: []}"], "gate stands in the run's file", ""),
    (["+gate.checks=[]"], "gate.checks stands in the run's file", ""),
    (["name=v1"], "name stands in the run's file", ""),
    (["phase@_global_=t1"], "phase@_global_ stands in the phase's file", ""),
    (["+model@gate=v0"], "model@gate stands in the run's file", ""),
    (["device=cpu", "features.capture=true"], "features.capture=true needs device=cuda", ""),
    (["device=cpu", "run=v9"], "features.precision=bf16 needs device=cuda", ""),
    (["--foo"], "--foo", "keys have no dashes"),
    (["--run=v0"], "--run", "keys have no dashes"),
    (["--resolve"], "--resolve", "--cfg job"),
    (["--cfg", "jobs"], "jobs", "job"),
    (["--config-dir", "nowhere"], "--config-dir nowhere", "no such directory"),
    (["--config-path", "x"], "--config-path", "XTRAIN_CONF"),
    (["-m", "seed=0,x"], "seed=x", "must be a whole number"),
    (["-m", "run=v0,nope"], "run=nope", "there is no such run"),
    (["--cfg", "job", "run=nope"], "run=nope", "there is no such run"),
    (["--info", "config", "sed=3"], "no key sed", "nearest: seed"),
    (["-sc", "install=cmd"], "cmd", "bash"),
]


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "says", "hints"), BAD)
def test_a_users_error_is_one_line_exit_code_2_and_nothing_written(
    arguments, says, hints, capsys, empty_directory
):
    code = main([*arguments, "dry_run=true"])
    shown = capsys.readouterr()
    assert code == 2
    assert shown.err.startswith("xtrain: ") and shown.err.count("\n") == 1
    assert says in shown.err and hints in shown.err
    assert shown.out == ""
    assert list(empty_directory.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["/d/x,y", "/d/it's", 'a "b" c', "[x", "{a", "(1", "a\\,'b", "x=y,z", "/d/100%,$HOME"],
)
def test_the_way_to_write_a_text_that_is_told_works(text, capsys):
    assert main([f"out={text}", "dry_run=true"]) == 2
    (hint,) = shlex.split("'out=" + capsys.readouterr().err.rpartition("write 'out=")[2])
    assert load_run(compose([hint])).out == text
    assert main([hint, "dry_run=true"]) == 0


@pytest.mark.parametrize(
    ("override", "hint", "values"),
    [
        ("seed=1,2", ["-m", "seed=1,2"], ["seed=1", "seed=2"]),
        ("train.prompts=a,b", ["train.prompts=[a,b]"], []),
    ],
)
def test_other_remedies_that_are_told_work(override, hint, values, capsys):
    assert main([override, "dry_run=true"]) == 2
    told = capsys.readouterr().err
    assert "add -m" in told and (hint[0] == "-m" or hint[0] in told)
    assert main([*hint, "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    assert all(value in shown for value in values)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: mine\nseeed: 3\n", "run/mine.yaml: no key seeed; nearest: seed"),
        ("name: mine\noptim: {lr: fast}\n", "run/mine.yaml: optim.lr=fast"),
        ("name: mine\nseed: 3\n", "is missing"),
        ("name: [\n", "mine.yaml"),
        ("defaults: [{override /model: v77}]\nname: mine\n", "model=v77"),
    ],
)
def test_an_error_in_ones_own_run_file_names_file_and_key(text, says, capsys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.yaml").write_text(f"# @package _global_\n{text}", "utf-8")
    assert main(["--config-dir", str(tmp_path), "run=mine", "dry_run=true"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and says in line


@pytest.mark.parametrize("name", [f"v{n}" for n in range(13)])
def test_a_dry_run_describes_every_run_and_writes_nothing(name, capsys, empty_directory):
    assert main([f"run={name}", "dry_run=true"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"run {name}, phase pretrain")
    assert "FLOP" in shown.out and "state" in shown.out
    assert list(empty_directory.iterdir()) == []


def test_without_a_run_it_is_v0(capsys):
    assert main(["dry_run=true"]) == 0
    assert capsys.readouterr().out.startswith("run v0, phase pretrain")


def test_options_may_stand_between_keys(capsys):
    assert main(["run=v1", "--cfg", "job", "--resolve", "seed=5"]) == 0
    shown = capsys.readouterr().out
    assert "name: v1" in shown and "seed: 5" in shown and "hydra" not in shown


def test_several_runs_each_get_their_turn(capsys, empty_directory):
    assert main(["-m", "run=v0,v1", "dry_run=true"]) == 0
    shown = capsys.readouterr().out
    assert "run v0, phase" in shown and "run v1, phase" in shown
    assert list(empty_directory.iterdir()) == []


@pytest.mark.parametrize("order", ["v9,v0", "v0,v9"])
def test_the_exit_code_of_several_runs_is_that_of_the_worst(order, capsys):
    assert main(["-m", f"run={order}", "device=cpu", "dry_run=true"]) == 2
    shown = capsys.readouterr()
    assert "run v0, phase" in shown.out
    assert shown.err.count("\n") == 1 and "needs device=cuda" in shown.err


def test_several_runs_are_all_checked_before_the_first_starts(capsys):
    assert main(["-m", "train.seq_len=64,999", "dry_run=true"]) == 2
    assert capsys.readouterr().out == ""


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UsageError("say\nless"), 2, "xtrain: say less\n"),
        (Interrupted(2), 130, "xtrain: interrupted by signal 2\n"),
        (Interrupted(15), 143, "xtrain: interrupted by signal 15\n"),
        (KeyboardInterrupt(), 130, "xtrain: interrupted\n"),
    ],
)
def test_an_ending_has_its_exit_code_and_one_line(error, code, says, capsys):
    assert guarded("xtrain", _raise, error) == code
    assert capsys.readouterr().err == says


def test_a_bug_is_exit_code_1_with_its_traceback(capsys):
    assert guarded("xtrain", _raise, RuntimeError("boom")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_names_commands_choices_and_exit_codes(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for part in ("xtrain-gate", "v10 v11 v12", "t20 t21", "tinystories", "dry_run", "3 a gate"):
        assert part in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_help_lists_runs_of_ones_own(capsys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.yaml").write_text("name: mine\n", "utf-8")
    main(["--config-dir", str(tmp_path), "--help"])
    assert " mine " in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--info", "defaults-tree"], ["--hydra-help"]])
def test_hydras_own_flags_answer(flags, capsys):
    assert main(flags) == 0
    assert capsys.readouterr().out


def test_completion_offers_runs(monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", "xtrain run=v1")
    monkeypatch.setenv("COMP_POINT", "13")
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.split() == ["run=v1", "run=v10", "run=v11", "run=v12"]


def test_a_process_answers_without_importing_anything_heavy():
    script = (
        "import sys; from pipelines.__main__ import main; code = main(['run=v9', 'dry_run=true'])\n"
        "heavy = {'numba', 'mlflow', 'datasets', 'pandas', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=_environment())


def test_help_does_not_even_import_hydra():
    script = (
        "import sys; from pipelines.__main__ import main; main(['--help'])\n"
        "assert not {'hydra', 'omegaconf', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=_environment())


def test_as_a_process_a_usage_error_is_exit_code_2_and_one_line(empty_directory):
    command = [sys.executable, "-m", "pipelines", "run=nope"]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert list(empty_directory.iterdir()) == []


def _environment() -> dict[str, str]:
    # The tests' import path, because the working directory is another one.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
