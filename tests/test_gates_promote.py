"""Only a run whose checks and phases all PASS is promoted, and the local ledger decides."""

import sqlite3
from contextlib import closing
from datetime import date

import pytest

from gates.judging.gate import Failed, NotMeasured
from gates.judging.judge import judge
from gates.judging.ledger import Ledger
from gates.judging.measure import Standing
from gates.judging.promote import granted_by, promote_or_refuse
from xtrain.config.check import Check
from xtrain.errors import UsageError
from xtrain.track.mirror import Mirror, catch_up
from xtrain.track.mlflow_store import open_store
from xtrain.track.registry import export_digest, model_directory, register_owed
from xtrain.track.run_dir import open_run
from xtrain.track.store_address import store_uri

LOSS = Check("margin", ">=", 0.5)
CUDA_ONLY = Check("speed", ">=", 2.0, device="cuda")
PRINTS = {"config": "c0", "code": "k0", "data": "d0", "checkpoint": "w0"}
PASSED = {"T1": Standing("T1", "cpu", "PASS"), "T6": Standing("T6", "cpu", "PASS")}


def make_run(root):
    run = open_run(root / "outputs", "v0", "t6", {}, config_text="", fingerprints=PRINTS, facts={})
    (run.path / "export").mkdir()
    (run.path / "export" / "config.json").write_text(f'"{run.id}"')
    return run


def decide(root, margin=0.6, requires=PASSED, run=None, mirror=None, wait_s=10.0):
    return promote_or_refuse(
        run or make_run(root),
        judge([LOSS, CUDA_ONLY], {"margin": margin}, "cpu"),
        requires=requires,
        device="cpu",
        ledger=Ledger(root / "outputs" / "ledger.jsonl"),
        fingerprints=PRINTS,
        mirror=mirror,
        wait_s=wait_s,
    )


def pay_owed(root, say=None):
    ledger = Ledger(root / "outputs" / "ledger.jsonl")
    return register_owed(root / "outputs", granted_by(ledger), say)


def owe(run):
    """Ask for a registration, as a promotion does that MLflow cannot take, and as anybody could."""
    owed = {"name": "xtrain-v0", "tags": {"xtrain.verdict": "PASS"}, "version": None}
    run.write_json("registry.json", owed)


def mirrored(run):
    mirror = Mirror(run, interval_s=0.05).start()
    run.set_status("FINISHED")
    mirror.close("FINISHED")


def last_entry(root):
    return Ledger(root / "outputs" / "ledger.jsonl").entries()[-1]


def promote_in_mlflow(root, margin=0.6):
    run = make_run(root)
    mirror = Mirror(run, say=lambda line: None, interval_s=0.05).start()
    promotion = decide(root, margin, run=run, mirror=mirror)
    run.set_status("FINISHED")
    assert mirror.close("FINISHED") == ""
    return run, mirror.run_id, promotion


def test_a_run_that_passes_everything_is_promoted_in_the_ledger(tmp_path):
    assert decide(tmp_path).promoted
    entry = last_entry(tmp_path)
    assert (entry["kind"], entry["gate"], entry["verdict"]) == ("promotion", "v0", "PASS")
    exported = export_digest(next((tmp_path / "outputs").glob("v0/t6/*")))
    assert entry["fingerprint"] == {**PRINTS, "export": exported} and entry["requires"] == {
        "T1": "PASS",
        "T6": "PASS",
    }


def promotions(root):
    entries = Ledger(root / "outputs" / "ledger.jsonl").entries()
    return [entry["verdict"] for entry in entries if entry["kind"] == "promotion"]


def test_the_same_weights_are_promoted_once_however_often_the_run_goes_on(tmp_path):
    run = make_run(tmp_path)
    assert decide(tmp_path, run=run).promoted and decide(tmp_path, run=run).promoted
    assert promotions(tmp_path) == ["PASS"]
    assert not decide(tmp_path, 0.4, run=run).promoted
    assert decide(tmp_path, run=run).promoted
    assert promotions(tmp_path) == ["PASS", "FAIL", "PASS"]
    (run.path / "export" / "config.json").write_text("another export")
    assert decide(tmp_path, run=run).promoted
    assert promotions(tmp_path) == ["PASS", "FAIL", "PASS", "PASS"]


def test_a_promotion_made_again_registers_no_second_version(here):
    run, run_id, first = promote_in_mlflow(here)
    (run.path / "registry.json").unlink()  # as when the disk was full
    mirror = Mirror(run, say=lambda line: None, interval_s=0.05).start()
    again = decide(here, run=run, mirror=mirror)
    assert mirror.close("FINISHED") == ""
    assert again.version == first.version is not None and mirror.run_id == run_id
    assert len(open_store(store_uri()).search_model_versions("name='xtrain-v0'")) == 1
    assert promotions(here) == ["PASS"]


@pytest.mark.parametrize("margin", [0.4, float("nan")])
def test_a_run_that_misses_its_bar_is_refused_with_the_reason(tmp_path, margin):
    promotion = decide(tmp_path, margin)
    assert not promotion.promoted and promotion.reasons[0].startswith("margin: FAIL")
    assert last_entry(tmp_path)["verdict"] == "FAIL"
    assert last_entry(tmp_path)["reasons"] == list(promotion.reasons)


@pytest.mark.parametrize(
    ("value", "verdict"), [(NotMeasured("no set"), "NOT MEASURED"), (Failed("OSError"), "ERROR")]
)
def test_a_check_of_the_run_that_has_no_value_refuses(tmp_path, value, verdict):
    promotion = decide(tmp_path, value)
    assert not promotion.promoted and promotion.reasons[0].startswith(f"margin: {verdict}")


@pytest.mark.parametrize("verdict", ["FAIL", "ERROR", "STALE", "NOT MEASURED"])
def test_every_phase_that_is_not_pass_refuses(tmp_path, verdict):
    promotion = decide(tmp_path, requires={**PASSED, "T6": Standing("T6", "cpu", verdict)})
    assert not promotion.promoted and promotion.reasons[0].startswith(f"gate T6: {verdict}")


def test_a_pass_on_another_device_class_refuses(tmp_path):
    promotion = decide(tmp_path, requires={"T6": Standing("T6", "cuda", "PASS")})
    assert promotion.reasons == ("gate T6: measured on cuda, not on cpu",)


def test_a_run_without_a_check_for_its_device_class_is_refused(tmp_path):
    run = make_run(tmp_path)
    promotion = promote_or_refuse(
        run,
        judge([CUDA_ONLY], {}, "cpu"),
        requires={},
        device="cpu",
        ledger=Ledger(tmp_path / "ledger.jsonl"),
        fingerprints=PRINTS,
    )
    assert promotion.reasons == ("no check of the run was measured on cpu",)


def test_a_waived_phase_does_not_refuse_and_is_named(tmp_path):
    ledger = Ledger(tmp_path / "outputs" / "ledger.jsonl")
    waiver = ledger.waive("t6", who="Ada", why="no GPU until May", until=date(9999, 1, 1))
    promotion = decide(tmp_path, requires={"T6": Standing("T6", "cpu", "FAIL")})
    assert promotion.promoted and "waived by Ada" in promotion.notes[0]
    assert last_entry(tmp_path)["waivers"] == [waiver["hash"]]


def test_an_expired_waiver_refuses(tmp_path):
    ledger = Ledger(tmp_path / "outputs" / "ledger.jsonl")
    ledger.waive("T6", who="Ada", why="no GPU until May", until=date(2000, 1, 1))
    promotion = decide(tmp_path, requires={"T6": Standing("T6", "cpu", "FAIL")})
    assert not promotion.promoted and "T6" in promotion.reasons[0]


def test_a_waiver_of_another_phase_refuses(tmp_path):
    ledger = Ledger(tmp_path / "outputs" / "ledger.jsonl")
    ledger.waive("T5", who="Ada", why="no GPU until May", until=date(9999, 1, 1))
    promotion = decide(tmp_path, requires={"T6": Standing("T6", "cpu", "FAIL")})
    assert not promotion.promoted and "T6" in promotion.reasons[0]


def test_a_tampered_ledger_refuses(tmp_path):
    decide(tmp_path, 0.4)
    path = tmp_path / "outputs" / "ledger.jsonl"
    path.write_text(path.read_text().replace('"FAIL"', '"PASS"'))
    promotion = decide(tmp_path)
    assert not promotion.promoted and "line 1 is broken" in promotion.reasons[0]


def test_a_promoted_run_gets_a_registered_version_and_the_alias(here):
    run, run_id, promotion = promote_in_mlflow(here)
    version = open_store(store_uri()).get_model_version_by_alias("xtrain-v0", "promoted")
    assert str(version.version) == promotion.version and version.run_id == run_id
    assert version.tags["xtrain.verdict"] == "PASS" and version.tags["gate.T6"] == "PASS"
    assert version.tags["fingerprint.checkpoint"] == "w0"
    exported = model_directory("models:/xtrain-v0@promoted") / "config.json"
    assert exported.read_text() == f'"{run.id}"'
    assert model_directory(f"models:/xtrain-v0/{promotion.version}") == exported.parent


def test_a_refused_run_is_tagged_and_moves_no_alias(here):
    _, _, first = promote_in_mlflow(here)
    _, run_id, second = promote_in_mlflow(here, margin=0.1)
    client = open_store(store_uri())
    version = client.get_model_version_by_alias("xtrain-v0", "promoted")
    assert second.version is None and str(version.version) == first.version
    assert client.get_run(run_id).data.tags["xtrain.verdict"] == "REFUSED"
    assert len(client.search_model_versions("name='xtrain-v0'")) == 1


def test_a_promotion_that_mlflow_cannot_take_stands_and_is_registered_later(here):
    run = make_run(here)
    with closing(sqlite3.connect(here / "mlflow.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        mirror = Mirror(run, say=lambda line: None, interval_s=0.05).start()
        promotion = decide(here, run=run, mirror=mirror, wait_s=0.1)
        run.set_status("FINISHED")
        mirror.close("FINISHED", timeout_s=0.1)
        mirror._thread.join()
        other.execute("ROLLBACK")
    assert promotion.promoted and "registry is behind" in promotion.notes[0]

    catch_up(here / "outputs")
    assert pay_owed(here) == [run.path]

    version = open_store(store_uri()).get_model_version_by_alias("xtrain-v0", "promoted")
    assert version.tags["xtrain.id"] == run.id
    assert pay_owed(here) == []


def test_a_late_registration_does_not_move_the_alias_back(here):
    older = make_run(here)
    assert decide(here, run=older).promoted
    owe(older)
    mirrored(older)
    newer, _, _ = promote_in_mlflow(here)

    assert pay_owed(here) == [older.path]

    version = open_store(store_uri()).get_model_version_by_alias("xtrain-v0", "promoted")
    assert version.tags["xtrain.id"] == newer.id


@pytest.mark.parametrize("content", ["[1]", "7", '{"tags": 3}', '{"name": "../x", "tags": {}}', ""])
def test_a_damaged_registry_file_is_said_and_passed_over(here, content):
    spoilt, _, _ = promote_in_mlflow(here)
    (spoilt.path / "registry.json").write_text(content)
    other = make_run(here)
    decide(here, run=other)
    owe(other)
    mirrored(other)
    said = []

    assert pay_owed(here, said.append) == [other.path]

    assert len(said) == 1 and "registry.json is damaged" in said[0]


def test_a_request_that_the_ledger_does_not_grant_is_not_registered(here):
    refused, unknown, edited = make_run(here), make_run(here), make_run(here)
    decide(here, 0.1, run=refused)
    decide(here, run=edited)
    (edited.path / "export" / "config.json").write_text("other weights")
    for run in (refused, unknown, edited):
        owe(run)
        mirrored(run)
    assert pay_owed(here) == []
    assert open_store(store_uri()).search_registered_models() == []


def test_a_run_that_was_refused_after_its_promotion_is_granted_nothing(here):
    run = make_run(here)
    decide(here, run=run)
    decide(here, 0.1, run=run)
    owe(run)
    mirrored(run)
    assert pay_owed(here) == []


def test_a_broken_ledger_grants_nothing(here):
    run = make_run(here)
    decide(here, 0.1, run=run)
    path = here / "outputs" / "ledger.jsonl"
    path.write_text(path.read_text().replace('"FAIL"', '"PASS"'))
    owe(run)
    mirrored(run)
    assert pay_owed(here) == []


def test_what_else_refuses_is_among_the_reasons_and_in_the_ledger(tmp_path):
    promotion = promote_or_refuse(
        make_run(tmp_path),
        judge([LOSS], {"margin": 0.6}, "cpu"),
        requires=PASSED,
        device="cpu",
        ledger=Ledger(tmp_path / "outputs" / "ledger.jsonl"),
        fingerprints=PRINTS,
        bars="of the package",
        beside=["no bar on a loss"],
    )
    assert promotion.reasons == ("no bar on a loss",)
    assert last_entry(tmp_path)["reasons"] == ["no bar on a loss"]
    assert last_entry(tmp_path)["bars"] == "of the package"


def test_what_is_only_reported_neither_refuses_nor_promotes(tmp_path):
    ledger = Ledger(tmp_path / "outputs" / "ledger.jsonl")
    reported = Check("speed", "reported")
    for checks, promoted in (([LOSS, reported], True), ([reported], False)):
        promotion = promote_or_refuse(
            make_run(tmp_path),
            judge(checks, {"margin": 0.6, "speed": 1.2}, "cpu"),
            requires=PASSED,
            device="cpu",
            ledger=ledger,
            fingerprints=PRINTS,
        )
        assert promotion.promoted is promoted


@pytest.mark.parametrize(
    "uri", ["models:/xtrain-v0", "xtrain-v0@promoted", "models:/none@promoted"]
)
def test_a_model_that_is_not_there_is_a_usage_error(here, uri):
    with pytest.raises(UsageError, match=r"models:/|none"):
        model_directory(uri)
