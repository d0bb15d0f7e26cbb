"""`xtrain-gate audit`: a shortened ledger, a foreign version and a moved alias are seen."""

import pytest
from test_gates_promote import decide, make_run, promote_in_mlflow

from gates.__main__ import main
from gates.judging.audit import audit, refuse_foreign
from gates.judging.ledger import Ledger
from xtrain.errors import UsageError
from xtrain.track.mlflow_store import open_store
from xtrain.track.store_address import store_uri

PROMOTED = "models:/xtrain-v0@promoted"


@pytest.fixture
def ledger(here):
    return Ledger.of(here / "outputs")


def problems(here, ledger):
    return list(audit(ledger, here / "no evidence").problems)


def test_a_sound_history_has_no_problem(here, ledger, capsys):
    promote_in_mlflow(here)
    promote_in_mlflow(here, margin=0.1)
    promote_in_mlflow(here)
    assert problems(here, ledger) == []
    refuse_foreign(PROMOTED, ledger)
    assert main(["audit", "--out", "outputs"]) == 0
    shown = capsys.readouterr().out
    assert "3 entries" in shown and "3 decisions known to MLflow, 2 registered versions" in shown


def test_entries_cut_off_the_end_are_missed(here, ledger, capsys):
    promote_in_mlflow(here)
    promote_in_mlflow(here, margin=0.1)
    first, _ = ledger.path.read_text().splitlines(keepends=True)
    ledger.path.write_text(first)
    assert ledger.verify() is None
    (problem,) = problems(here, ledger)
    assert "was shortened or replaced: MLflow knows entry 2" in problem
    assert main(["audit", "--out", "outputs"]) == 1
    assert "audit FAIL: 1 problems" in capsys.readouterr().out


def test_a_ledger_begun_anew_is_missed_and_its_promotions_are_foreign(here, ledger):
    promote_in_mlflow(here)
    ledger.path.unlink()
    decide(here, run=make_run(here))
    shortened, foreign = problems(here, ledger)
    assert "was shortened or replaced" in shortened and "is foreign" in foreign


def test_a_version_that_nobody_promoted_is_reported_and_no_parent(here, ledger):
    promote_in_mlflow(here)
    client = open_store(store_uri())
    sound = client.get_model_version_by_alias("xtrain-v0", "promoted")
    forged = client.create_model_version("xtrain-v0", sound.source, run_id=sound.run_id)
    client.set_registered_model_alias("xtrain-v0", "promoted", forged.version)
    (problem,) = problems(here, ledger)
    assert problem.startswith("models:/xtrain-v0/2 is foreign")
    with pytest.raises(UsageError, match="init_from=models:/xtrain-v0@promoted: .*is foreign"):
        refuse_foreign(PROMOTED, ledger)
    refuse_foreign("models:/xtrain-v0/1", ledger)


def test_a_version_with_borrowed_tags_holds_another_export(here, ledger):
    promote_in_mlflow(here)
    client = open_store(store_uri())
    sound = client.get_model_version_by_alias("xtrain-v0", "promoted")
    other = here / "other"
    other.mkdir()
    (other / "config.json").write_text("trained on the held-out text")
    forged = client.create_model_version("xtrain-v0", other.as_uri(), tags=sound.tags)
    client.set_registered_model_alias("xtrain-v0", "promoted", forged.version)
    (problem,) = problems(here, ledger)
    assert "holds another export than the one that was judged" in problem
    with pytest.raises(UsageError, match="holds another export"):
        refuse_foreign(PROMOTED, ledger)


def test_an_alias_that_was_moved_back_is_reported_and_no_parent(here, ledger):
    promote_in_mlflow(here)
    promote_in_mlflow(here)
    open_store(store_uri()).set_registered_model_alias("xtrain-v0", "promoted", "1")
    (problem,) = problems(here, ledger)
    assert "@promoted was moved: it is on models:/xtrain-v0/1" in problem
    with pytest.raises(UsageError, match="was moved"):
        refuse_foreign(PROMOTED, ledger)


def test_weights_that_claim_no_promotion_are_taken_at_their_word(here, ledger):
    for origin in (None, "somewhere", "models:/of-a-friend@promoted"):
        refuse_foreign(origin, ledger)


def test_an_audit_makes_no_store(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main(["audit", "--out", "outputs"]) == 0
    assert "no MLflow store" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main(["audit", "T1"]) == 2


def test_an_unsigned_ledger_is_a_problem_where_keys_are_trusted(here, ledger, monkeypatch):
    from gates.judging.signing import make_key

    decide(here, 0.1, run=make_run(here))
    (here / "trusted").write_text(make_key(here / "key.pem"))
    monkeypatch.setenv("XTRAIN_TRUSTED_KEYS", str(here / "trusted"))
    (problem,) = problems(here, ledger)
    assert problem.endswith("line 1: not signed by a trusted key")
