"""Every YAML file composes, counts what it says it counts, and differs as it says it differs."""

import dataclasses
import re

import pytest

from xtrain.config.bars import (
    data_label,
    for_data,
    gate_checks,
    run_gate,
)
from xtrain.config.compose import (
    compose,
    compose_with,
    hydra_app,
    load_run,
    load_saved,
    resolved_yaml,
)
from xtrain.config.files import choices, conf_dir
from xtrain.config.identity import (
    axes_differing,
    axis_differences,
    axis_of,
    config_fingerprint,
    flatten,
)
from xtrain.config.rules import check_features, resolve_features
from xtrain.data.dataset import data_fingerprint
from xtrain.errors import UsageError
from xtrain.models.counts import count_parameters

RUNS = choices("run")
PHASES = choices("phase")
STAGES = ["decode", "eval", "pretrain"]  # what a run may do; the other phases are what it claims
TEXT = {"text": ["data.path=somewhere", "eval.path=somewhere"]}


@pytest.fixture(scope="module")
def load():
    """Compose with one Hydra for all tests, each configuration once."""
    found = {}
    with hydra_app() as app:

        def load_once(*overrides: str):
            if overrides not in found:
                found[overrides] = load_run(compose_with(app, overrides))
            return found[overrides]

        yield load_once


@pytest.mark.parametrize("name", RUNS)
def test_every_run_composes_under_its_own_name(load, name):
    run = load(f"run={name}")
    assert run.name == name
    assert run.train.total_steps >= 1000
    assert run.train.prompts


@pytest.mark.parametrize("name", PHASES)
def test_every_phase_composes_under_its_own_name(load, name):
    run = load(f"phase={name}")
    assert run.phase.name == name
    assert run.phase.title and run.phase.claim
    assert bool(run.phase.checks) == (name not in STAGES)


@pytest.mark.parametrize("group", ["model", "data", "eval"])
def test_every_model_data_and_evaluation_set_file_composes(load, group):
    for name in choices(group):
        load(f"{group}={name}", "train.seq_len=32", *TEXT.get(name, []))


def test_all_thirteen_runs_and_twenty_one_phases_are_there():
    assert [f"v{n}" for n in range(13)] == RUNS
    assert [*STAGES, *(f"t{n}" for n in range(1, 22))] == PHASES


@pytest.mark.parametrize("name", RUNS)
def test_parameter_counts_are_exactly_those_of_the_gate(load, name):
    run = load(f"run={name}")
    counts = count_parameters(run.model, run.features.qk_norm)
    bars = {check.name: check.bar for check in run.gate.checks}
    assert (counts.core, counts.total) == (bars["params_core"], bars["params_total"])


@pytest.mark.parametrize("name", RUNS)
def test_parameter_counts_round_to_those_of_the_original(load, name):
    for check in load(f"run={name}").gate.checks:
        if check.name.startswith("params_"):
            number, letter = re.fullmatch(r"([\d.]+)([KMB])", check.original).groups()
            digits = len(number.partition(".")[2])
            size = {"K": 1e3, "M": 1e6, "B": 1e9}[letter]
            assert f"{check.bar / size:.{digits}f}" == number


@pytest.mark.parametrize("name", RUNS)
def test_a_run_differs_from_its_parent_in_exactly_the_axes_it_names(load, name):
    run = load(f"run={name}")
    if run.parent is None:
        assert name == "v0"
        return
    parent = load(f"run={run.parent}")
    assert axes_differing(run, parent) == set(run.axes), axis_differences(run, parent)


def test_v8_changes_only_the_model_and_v10_only_the_data(load):
    assert axes_differing(load("run=v8"), load("run=v6")) == {"model"}
    assert axes_differing(load("run=v10"), load("run=v9")) == {"data"}


@pytest.mark.parametrize(
    ("override", "axis"),
    [
        ("model.rope_theta=1e6", "model"),
        ("data.respect_documents=true", "data"),
        ("train.max_tokens=1000000", "data"),
        ("optim.lr=1e-3", "precision"),
        ("train.accumulation=2", "infra"),
    ],
)
def test_a_changed_value_shows_in_its_axis(load, override, axis):
    assert axes_differing(load(override), load()) == {axis}


def test_every_key_is_in_an_axis_or_in_none_on_purpose(load):
    for key in flatten(load()):
        axis_of(key)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_requires_phases_that_exist(load, name):
    required = load(f"run={name}").gate.requires
    assert required and {phase.lower() for phase in required} <= set(PHASES)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_file_opens_with_purpose_cost_and_command(name):
    lines = (conf_dir() / "run" / f"{name}.yaml").read_text("utf-8").splitlines()
    comment = [line for line in lines[1:5] if line.startswith("#")]
    assert "FLOP" in comment[1] and "tokens" in comment[1]
    assert comment[2] == f"#   xtrain run={name}"


@pytest.mark.parametrize("name", [phase for phase in PHASES if phase not in STAGES])
def test_a_phase_has_the_checks_that_a_gate_reads(load, name):
    checks, title, claim = gate_checks(name.upper())
    phase = load(f"phase={name}").phase
    assert (checks, title, claim) == (phase.checks, phase.title, phase.claim)
    assert len({check.name for check in checks}) == len(checks)


def test_features_arrive_phase_by_phase_and_stay(load):
    features = [load(f"phase=t{n}").features for n in range(1, 22)]
    off = dataclasses.asdict(features[0])
    arrived: set[str] = set()
    for each in features:
        now = {key for key, value in dataclasses.asdict(each).items() if value != off[key]}
        assert arrived <= now
        arrived = now
    assert arrived == set(off)


def test_a_phase_switches_off_what_its_run_asks_for_too_early(load):
    run = load("run=v9", "phase=t12")
    assert (run.features.attention, run.features.remat) == ("composed", "none")
    assert load("run=v9").features.remat == "block"


def test_an_override_beats_the_phase(load):
    assert load("phase=t12", "features.precision=fp32").features.precision == "fp32"


@pytest.mark.parametrize("name", PHASES)
def test_a_phase_can_be_trained_where_it_says_it_can(load, name):
    run = load(f"phase={name}")
    for device_class in run.phase.device_classes:
        resolved = resolve_features(run, device_class)
        assert None not in dataclasses.astuple(resolved)


def test_a_phase_that_is_all_cuda_is_refused_on_a_cpu(load):
    with pytest.raises(UsageError, match="phase=t11 needs device=cuda"):
        check_features(load("phase=t11"), "cpu")


@pytest.mark.parametrize(
    "feature",
    ["capture=true", "pool=true", "op_sync=false", "optimizer=device"],
)
def test_a_feature_that_a_cpu_lacks_is_refused_by_name(load, feature):
    with pytest.raises(UsageError, match=f"features.{feature} needs device=cuda"):
        check_features(load(f"features.{feature}"), "cpu")
    check_features(load(f"features.{feature}"), "cuda")


def test_flash_attention_is_the_best_of_a_gpu_and_refused_where_it_cannot_be(load):
    with pytest.raises(UsageError, match="features.attention=flash needs device=cuda"):
        check_features(load("features.attention=flash"), "cpu")
    odd = load("features.attention=flash", "model.head_dim=24")
    with pytest.raises(UsageError, match="needs model.head_dim a multiple of 16 up to 128.* 24;"):
        check_features(odd, "cuda")
    assert resolve_features(load("run=v9"), "cuda").attention == "flash"
    assert resolve_features(load(), "cpu").attention == "composed"
    open_features = load("run=v9", "model.head_dim=24")
    assert resolve_features(open_features, "cuda").attention == "composed"


def test_features_left_open_become_the_best_of_the_device(load):
    run = load("features.precision=null")
    assert resolve_features(run, "cpu").precision == "fp32"
    assert resolve_features(run, "cuda").precision == "bf16"
    assert resolve_features(load(), "cuda").precision == "fp32"  # v0 says so


def test_the_checks_of_other_data_are_left_out(load):
    def names(run) -> set[str]:
        gate = run_gate(run)
        label = data_label(gate, run.data.source, data_fingerprint(run.data))
        return {check.name for check in for_data(gate.checks, label)}

    on_sotu, on_stories = names(load()), names(load("data=tinystories"))
    assert on_stories - on_sotu == {"val_loss"}
    assert "margin_over_unigram_nats" in on_sotu


def test_a_saved_run_reads_back_equal(load, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(load("run=v9")), "utf-8")
    assert load_saved(path) == load("run=v9")


def test_a_damaged_saved_run_is_named(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("name: v0\nmodel: {hiden: 3}\n", "utf-8")
    with pytest.raises(UsageError, match=r"config.yaml: no key model.hiden"):
        load_saved(path)


def test_the_fingerprint_is_of_what_decides_the_training(load):
    same = ["out=elsewhere", "train.keep_last=5", "resume=none", "data.workers=1"]
    assert config_fingerprint(load(*same)) == config_fingerprint(load())
    for other in ("seed=1", "optim.lr=1e-3", "train.max_tokens=100000", "phase=t6"):
        assert config_fingerprint(load(other)) != config_fingerprint(load())


def test_a_directory_of_ones_own_adds_a_run_with_its_phase_and_gate(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults: [{override /model: v1}, {override /phase: t5}, _self_]\n"
        "name: mine\n"
        "train: {max_tokens: 100000, batch_size: 2, seq_len: 128}\n"
        "optim: {lr: 0.1}\n"
        "gate: {checks: [{name: val_loss, op: '<=', bar: 9}]}\n",
        "utf-8",
    )
    run = load_run(compose(["run=mine"], config_dir=str(tmp_path)))
    assert (run.name, run.model.hidden_size, run.phase.name) == ("mine", 256, "t5")
    assert run.features.qk_norm is False
    assert [check.bar for check in run_gate(run).checks] == [9]


def test_a_directory_of_ones_own_cannot_loosen_a_gate(tmp_path):
    (tmp_path / "easy").mkdir()
    text = "# @package _global_\ngate: {checks: [], requires: []}\n"
    (tmp_path / "easy" / "gate.yaml").write_text(text, "utf-8")
    run = load_run(compose(["+easy=gate"], config_dir=str(tmp_path)))
    assert run.gate.checks == []
    assert run_gate(run).checks and run_gate(run).requires


def test_a_conf_directory_that_is_none_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XTRAIN_CONF", str(tmp_path))
    with pytest.raises(UsageError, match="holds no config.yaml"):
        conf_dir()


def test_composing_within_a_composition_leaves_the_outer_one_working():
    with hydra_app() as app:
        compose(["run=v1"])
        assert load_run(compose_with(app, ["run=v2"])).name == "v2"
