"""YAML from someone else runs no code, leaves `out` by no name and tells no secret."""

import pytest

from pipelines.__main__ import main
from xtrain.config.compose import compose, load_run, load_saved
from xtrain.errors import UsageError

CANARY = "canary"
# Each makes the file CANARY if Hydra builds what it says.
FILES = {
    "launcher": (
        "hydra/launcher/mine.yaml",
        "_target_: os.system\n_args_: ['touch {canary}']\n",
        ["hydra/launcher=mine"],
        "hydra.launcher._target_",
    ),
    "sweeper": (
        "hydra/sweeper/mine.yaml",
        "_target_: builtins.open\nfile: {canary}\nmode: w\n",
        ["hydra/sweeper=mine"],
        "hydra.sweeper._target_",
    ),
    "callbacks": (
        "run/mine.yaml",
        "# @package _global_\nhydra:\n  callbacks:\n    x:\n      _target_: builtins.open\n"
        "      file: {canary}\n      mode: w\n",
        ["run=mine"],
        "hydra.callbacks",
    ),
    "logging": (
        "hydra/hydra_logging/mine.yaml",
        "version: 1\nhandlers:\n  x:\n    (): builtins.open\n    file: {canary}\n    mode: w\n"
        "root:\n  handlers: [x]\n",
        ["hydra/hydra_logging=mine"],
        "hydra.hydra_logging",
    ),
    "job logging": (
        "hydra/job_logging/mine.yaml",
        "version: 1\nhandlers:\n  x:\n    class: logging.FileHandler\n    filename: {canary}\n"
        "root:\n  handlers: [x]\n",
        ["hydra/job_logging=mine"],
        "hydra.job_logging",
    ),
    "environment": (
        "run/mine.yaml",
        "# @package _global_\nhydra:\n  job:\n    env_set: {{LD_PRELOAD: {canary}}}\n",
        ["run=mine"],
        "hydra.job.env_set",
    ),
    "in a job of a sweep": (
        "run/mine.yaml",
        "# @package _global_\nhydra:\n  job_logging:\n    handlers:\n      x: {{(): os.system}}\n",
        ["run=v0,mine"],
        "hydra.job_logging",
    ),
    "nested": (
        "hydra/sweeper/mine.yaml",
        "_target_: hydra._internal.core_plugins.basic_sweeper.BasicSweeper\nmax_batch_size:\n"
        "  _target_: builtins.open\n  file: {canary}\n  mode: w\nparams: null\n",
        ["hydra/sweeper=mine"],
        "hydra.sweeper.max_batch_size",
    ),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("many", [[], ["-m"]], ids=["one", "many"])
def test_a_file_that_names_code_is_refused_before_anything_is_built(tmp_path, capfd, name, many):
    where, content, overrides, key = FILES[name]
    if not many and ("," in "".join(overrides)):
        return
    canary = tmp_path / CANARY
    path = tmp_path / "conf" / where
    path.parent.mkdir(parents=True)
    path.write_text(content.format(canary=canary))
    typed = ["--config-dir", str(tmp_path / "conf"), *many, *overrides]
    code = main([*typed, "dry_run=true", f"out={tmp_path / 'out'}"])
    told = capfd.readouterr().err
    assert (code, told.count("\n")) == (2, 1), told
    assert key in told
    assert not canary.exists()
    assert not (tmp_path / "out").exists()


TYPED = [
    ["hydra.launcher._target_=os.system"],
    ["+hydra.callbacks.x._target_=os.system"],
    ["++hydra.hydra_logging.handlers.console.class=logging.FileHandler"],
    ["hydra.searchpath=[pkg://antigravity]"],
    ["hydra.job.chdir=true"],
    ["hydra.run.dir=/tmp"],
    ["hydra.sweep.dir=/tmp"],
    ["hydra.job_logging.disable_existing_loggers=true,false"],
    ["data@hydra.callbacks=sotu"],
    ["+hydra.launcher.setup=[reboot]"],
    ["hydra.sweeper.params={seed:'0\\n1'}"],
]


@pytest.mark.parametrize("overrides", TYPED, ids=" ".join)
def test_an_override_asks_hydra_for_nothing_but_plugins(tmp_path, capfd, overrides):
    code = main(["-m", *overrides, "dry_run=true", f"out={tmp_path / 'out'}"])
    told = capfd.readouterr().err
    assert (code, told.count("\n")) == (2, 1), told
    assert not (tmp_path / "out").exists()


def test_the_shipped_launcher_and_sweeper_take_their_plain_values(tmp_path, capfd):
    typed = ["-m", "hydra.sweeper.max_batch_size=2", "seed=0,1", "dry_run=true"]
    assert main([*typed, f"out={tmp_path / 'out'}"]) == 0
    assert capfd.readouterr().out.count("parameters") == 2


@pytest.mark.parametrize("value", ["${oc.env:TOKEN}", "a-${oc.${phase.objective}.env:TOKEN,x}"])
def test_the_environment_is_not_read_into_what_is_recorded(tmp_path, monkeypatch, value):
    monkeypatch.setenv("TOKEN", "secret")
    with pytest.raises(UsageError) as caught:
        load_run(compose([f"data.path={value}"]))
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    (tmp_path / "config.yaml").write_text(f"name: v0\ndata: {{path: '{value}'}}\n")
    with pytest.raises(UsageError):
        load_saved(tmp_path / "config.yaml")


NAMES = ["../../x", "/dev/zero", "a/b", "..", "", ".hidden", "a\\\\b", "x" * 300]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["name", "data.name", "eval.name", "phase.name"])
def test_a_name_is_a_name_and_no_path(tmp_path, key, name):
    tree = compose([])
    node, _, leaf = key.rpartition(".")
    part = tree[node] if node else tree
    part[leaf] = name
    with pytest.raises(UsageError, match=f"^{key}="):
        load_run(tree)


OUT_OF_RANGE = [
    "model.num_hidden_layers=1000000",
    "model.max_position_embeddings=99999999999999999999999",
    "model.rope_theta=1e300",
    "model.rms_norm_eps=1e-300",
    "train.sample_tokens=18446744073709551616",
    "train.batch_size=99999999999",
    "train.seq_len=1000000000000",
    "train.dropout=0.9999999999",
    "train.dropout=nan",
    "train.save_every_steps=99999999999999999999999",
    "optim.lr=1e300",
    "optim.eps=1e-300",
    "optim.clip_norm=inf",
    "data.heldout_fraction=1e-300",
    "data.heldout_fraction=nan",
    "data.order_seed=18446744073709551616",
    "data.workers=100000000",
    "data.max_bytes=99999999999999999999999",
    "eval.order_seed=-1",
    "eval.tokens=99999999999999999999999",
    "eval.heldout_fraction=1e-300",
    "decode.max_new_tokens=99999999999999999999999",
    "decode.top_k=99999999999999999999999",
    "decode.temperature=inf",
    "seed=18446744073709551616",
]


@pytest.mark.parametrize("override", OUT_OF_RANGE)
def test_what_no_machine_could_do_is_refused_with_its_range(override):
    key = override.partition("=")[0]
    with pytest.raises(UsageError, match=f"^{key}=.* is (below|above) .*, the (least|most)"):
        load_run(compose([override]))


@pytest.mark.parametrize("objective", ["sft", "dpo", "grpo"])
def test_an_objective_that_nothing_reads_is_refused(objective):
    tree = compose([])
    tree.phase.objective = objective
    with pytest.raises(UsageError, match=f"phase.objective={objective} is not built yet"):
        load_run(tree)
