"""Signed verdicts: with trusted keys configured, what they did not sign counts for nothing."""

import json
from datetime import date

import pytest

from gates.__main__ import main
from gates.judging.evidence import read_evidence, write_evidence
from gates.judging.judge import judge
from gates.judging.ledger import Ledger, verdict_entry
from gates.judging.promote import decide
from gates.judging.signing import content_hash, make_key
from xtrain.config.check import Check
from xtrain.errors import UsageError

ERROR = Check("error", "<=", 1e-6)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "outputs" / "ledger.jsonl")


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """Sign with `own`, and trust it; `other` is a key that nobody trusts."""
    public = {name: make_key(tmp_path / f"{name}.pem") for name in ("own", "other")}
    (tmp_path / "trusted").write_text(f"# whom we believe\n{public['own']}  # own\n\n")

    def use(signing: str | None, *, trusting: bool):
        for variable, value in (
            ("XTRAIN_SIGNING_KEY", signing and tmp_path / f"{signing}.pem"),
            ("XTRAIN_TRUSTED_KEYS", trusting and tmp_path / "trusted"),
        ):
            if value:
                monkeypatch.setenv(variable, str(value))
            else:
                monkeypatch.delenv(variable, raising=False)

    use(None, trusting=False)
    return use


def verdict(gate="T5", error=1e-7, device="cpu"):
    results = judge([ERROR], {"error": error}, device)
    return verdict_entry(gate, results, device=device, fingerprint={"code": "a"}, facts={})


def rewritten(ledger):
    """The ledger with every FAIL turned into PASS and the whole chain computed anew."""
    previous = "0" * 64
    lines = []
    for line in ledger.path.read_text().splitlines():
        entry = json.loads(line.replace('"FAIL"', '"PASS"').replace('"value": 1.0', '"value": 0.0'))
        entry["previous"] = previous
        previous = entry["hash"] = content_hash(entry)
        lines.append(json.dumps(entry, sort_keys=True) + "\n")
    ledger.path.write_text("".join(lines))
    return ledger


def test_without_keys_nothing_is_signed_and_a_forged_chain_holds(ledger, keys):
    entry = ledger.append(verdict(error=1.0))
    assert "signature" not in entry and "signed_by" not in entry
    assert rewritten(ledger).verify() is None
    assert ledger.latest("T5", "cpu")["verdict"] == "PASS"


def test_a_forged_chain_counts_for_nothing_where_keys_are_trusted(ledger, keys):
    keys(None, trusting=True)
    ledger.append(verdict(error=1.0))
    assert rewritten(ledger).verify() is None
    assert ledger.latest("T5", "cpu") is None


def test_a_signed_entry_that_was_rewritten_breaks_the_ledger(ledger, keys):
    keys("own", trusting=False)
    ledger.append(verdict(error=1.0))
    assert "line 1 is broken: its signature" in rewritten(ledger).verify()


def test_only_entries_of_a_trusted_key_count(ledger, keys):
    keys("own", trusting=True)
    own = ledger.append(verdict())
    keys("other", trusting=True)
    ledger.append(verdict(error=1.0))
    keys(None, trusting=True)
    ledger.append(verdict(error=1.0))
    assert ledger.verify() is None
    assert ledger.latest("T5", "cpu") == own
    keys(None, trusting=False)
    assert ledger.latest("T5", "cpu")["verdict"] == "FAIL"


def test_a_signature_taken_off_breaks_the_chain(ledger, keys):
    keys("own", trusting=True)
    entry = ledger.append(verdict())
    bare = {k: v for k, v in entry.items() if k not in ("signature", "signed_by")}
    ledger.path.write_text(json.dumps(bare, sort_keys=True) + "\n")
    assert "line 1 is broken" in ledger.verify()


def test_a_waiver_that_no_trusted_key_signed_waives_nothing(ledger, keys):
    keys(None, trusting=True)
    ledger.waive("T6", who="Ada", why="no GPU", until=date(9999, 1, 1))
    assert ledger.waiver("T6", date(2026, 1, 1)) is None
    keys("own", trusting=True)
    ledger.waive("T6", who="Ada", why="no GPU", until=date(9999, 1, 1))
    assert ledger.waiver("T6", date(2026, 1, 1))["who"] == "Ada"


@pytest.mark.parametrize(("signing", "promoted"), [(None, False), ("other", False), ("own", True)])
def test_a_promotion_is_signed_by_a_trusted_key_or_refused(ledger, keys, signing, promoted):
    keys(signing, trusting=True)
    results = judge([ERROR], {"error": 1e-7}, "cpu")
    reasons, _, _ = decide(results, {}, device="cpu", ledger=ledger)
    assert (reasons == []) is promoted
    assert promoted or "accepts signed verdicts only" in reasons[0]


def test_rewritten_evidence_counts_for_nothing_where_keys_are_trusted(tmp_path, keys):
    keys("own", trusting=True)
    path = write_evidence(verdict(device="cuda", error=1.0), tmp_path / "evidence")
    assert read_evidence("T5", "cuda", path.parent)["checks"][0]["value"] == 1.0
    path.write_text(path.read_text().replace('"value": 1.0', '"value": 0.0'))
    assert read_evidence("T5", "cuda", path.parent) is None
    keys(None, trusting=False)
    assert read_evidence("T5", "cuda", path.parent)["checks"][0]["value"] == 0.0


def test_make_key_writes_for_its_owner_and_never_over_another(tmp_path, capsys):
    file = tmp_path / "key.pem"
    assert main(["make-key", str(file)]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.strip()) == 64 and "XTRAIN_TRUSTED_KEYS" in shown.err
    assert file.stat().st_mode & 0o777 == 0o600
    assert main(["make-key", str(file)]) == 2
    assert main(["make-key"]) == 2


@pytest.mark.parametrize("content", [None, "", "not a key", "ab" * 31])
def test_unusable_keys_are_named_in_one_line(ledger, tmp_path, monkeypatch, content):
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    for variable in ("XTRAIN_TRUSTED_KEYS", "XTRAIN_SIGNING_KEY"):
        monkeypatch.setenv(variable, str(file))
        with pytest.raises(UsageError, match=variable):
            ledger.append(verdict())
            ledger.latest("T5", "cpu")
        monkeypatch.delenv(variable)
