"""The ledger is append-only, shows every change, and survives a kill in mid-append."""

import json
import multiprocessing
from datetime import date

import pytest

from gates.judging.gate import Failed, NotMeasured
from gates.judging.judge import judge, verdict_of
from gates.judging.ledger import Ledger, recorded_results, recorded_values, verdict_entry
from xtrain.config.check import Check
from xtrain.errors import UsageError

CHECKS = [
    Check("error", "<=", 1e-6, original="1.5e-4", unit="rel"),
    Check("speed", ">=", 2.0, device="cuda"),
    Check("ok", "==", 1.0),
]


def verdict(gate="T5", error=1e-7, device="cpu", code="a"):
    results = judge(CHECKS, {"error": error, "ok": 1.0}, device)
    return verdict_entry(gate, results, device=device, fingerprint={"code": code}, facts={})


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "outputs" / "ledger.jsonl")


def lines_of(ledger):
    return ledger.path.read_text().splitlines(keepends=True)


def test_an_empty_ledger_holds_and_knows_nothing(ledger):
    assert ledger.verify() is None
    assert ledger.entries() == [] and ledger.latest("T5", "cpu") is None


def test_entries_are_chained_in_the_order_of_their_appending(ledger):
    first, second = ledger.append(verdict()), ledger.append(verdict(error=1.0))
    assert second["previous"] == first["hash"]
    assert ledger.entries() == [first, second] and ledger.verify() is None
    assert first["date"] and second["verdict"] == "FAIL"


def test_the_latest_verdict_is_that_of_the_gate_and_device_class(ledger):
    ledger.append(verdict("T5"))
    latest = ledger.append(verdict("T5", error=1.0))
    ledger.append(verdict("T5", device="cuda"))
    ledger.append(verdict("T6"))
    ledger.append({"kind": "promotion", "gate": "T5", "verdict": "PASS", "device": "cpu"})
    assert ledger.latest("t5", "cpu") == latest


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_changed_value_is_found_on_its_line(ledger, number):
    for error in (1e-7, 1.0, 1e-8):
        ledger.append(verdict(error=error))
    lines = lines_of(ledger)
    lines[number - 1] = lines[number - 1].replace('"gate": "T5"', '"gate": "T6"')
    ledger.path.write_text("".join(lines))
    assert f"line {number} is broken" in ledger.verify()


def test_a_change_with_its_hash_recomputed_breaks_the_next_line(ledger):
    ledger.append(verdict(error=1.0))
    forged = Ledger(ledger.path.with_name("forged.jsonl"))
    forged.append(verdict(error=1e-7))
    ledger.append(verdict())
    ledger.path.write_text(lines_of(forged)[0] + lines_of(ledger)[1])
    assert "line 2 is broken" in ledger.verify()


@pytest.mark.parametrize("order", [[0, 2], [1, 0, 2], [0, 1, 1, 2]])
def test_a_removed_swapped_or_repeated_line_is_found(ledger, order):
    for error in (1e-7, 1.0, 1e-8):
        ledger.append(verdict(error=error))
    lines = lines_of(ledger)
    ledger.path.write_text("".join(lines[number] for number in order))
    assert "is broken" in ledger.verify()


def test_a_line_that_is_no_entry_is_named_and_nothing_is_read_past_it(ledger):
    ledger.append(verdict())
    with ledger.path.open("a") as file:
        file.write("PASS\n")
    assert "line 2 is broken" in ledger.verify()
    with pytest.raises(UsageError, match="line 2 is broken"):
        ledger.latest("T5", "cpu")
    with pytest.raises(UsageError, match="line 2 is broken"):
        ledger.append(verdict())


def test_an_append_that_a_kill_interrupted_is_passed_over_and_removed(ledger):
    first = ledger.append(verdict())
    whole = ledger.path.read_text()
    with ledger.path.open("a") as file:
        file.write(whole[: len(whole) // 2].rstrip("\n"))

    assert ledger.verify() is None and ledger.entries() == [first]
    second = ledger.append(verdict(error=1.0))

    assert ledger.verify() is None and ledger.entries() == [first, second]


def append_many(path):
    for _ in range(25):
        Ledger(path).append(verdict())


def test_four_processes_may_append_at_once(ledger):
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=append_many, args=(ledger.path,)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert ledger.verify() is None and len(ledger.entries()) == 100


def test_a_ledger_that_cannot_be_written_is_a_usage_error(tmp_path):
    (tmp_path / "outputs").write_text("a file in the way")
    with pytest.raises(UsageError, match=r"cannot write .*ledger\.jsonl"):
        Ledger(tmp_path / "outputs" / "ledger.jsonl").append(verdict())


def test_a_waiver_holds_to_its_last_day_and_names_who_and_why(ledger):
    ledger.waive("T7", who="Ada", why="no GPU before May", until=date(2026, 5, 1))
    assert ledger.waiver("t7", date(2026, 5, 1))["who"] == "Ada"
    assert ledger.waiver("T7", date(2026, 5, 2)) is None
    assert ledger.waiver("T8", date(2026, 4, 1)) is None
    with pytest.raises(UsageError, match="who accepts it and why"):
        ledger.waive("T7", who="Ada", why=" ", until=date(2026, 5, 1))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"kind": "waiver", "gate": "T7", "who": "Ada", "why": "x"}, "until is missing"),
        ({"kind": "waiver", "gate": "T7", "who": "Ada", "why": "x", "until": 7}, "until is 7"),
        (
            {"kind": "waiver", "gate": "T7", "who": "Ada", "why": "x", "until": "2026-02-31"},
            "day is out of range",
        ),
        ({**verdict(), "checks": None}, "checks is null, not a list"),
        ({**verdict(), "fingerprint": "x"}, 'fingerprint is "x", not an object'),
        ({**verdict(), "gate": ["T5"]}, r'gate is \["T5"\], not a text'),
        ({"kind": 3}, "kind is 3, not a text"),
    ],
)
def test_an_entry_of_the_wrong_types_is_named_though_its_hash_is_right(ledger, entry, reason):
    ledger.append(entry)
    assert "line 1 is broken: not a ledger entry: " in ledger.verify()
    for read in (
        ledger.entries,
        lambda: ledger.latest("T5", "cpu"),
        lambda: ledger.waiver("T7", date(2026, 1, 1)),
        lambda: ledger.append(verdict()),
    ):
        with pytest.raises(UsageError, match=f"line 1 is broken: not a ledger entry: .*{reason}"):
            read()


def test_a_check_that_passed_on_no_value_is_no_entry(ledger):
    entry = verdict()
    entry["checks"][0] |= {"value": None, "verdict": "PASS"}
    ledger.append(entry)
    with pytest.raises(UsageError, match="check error is PASS and has no value"):
        ledger.entries()


def test_a_recorded_entry_is_judged_again_to_the_same_verdicts(ledger):
    measured = {
        "error": float("nan"),
        "ok": Failed("KeyError: 'x'"),
        "speed": NotMeasured("no GPU"),
    }
    results = judge(CHECKS, measured, "cuda")
    entry = verdict_entry("T5", results, device="cuda", fingerprint={"code": "a"}, facts={})

    stored = json.loads(json.dumps(ledger.append(entry), allow_nan=False))
    again = judge(CHECKS, recorded_values(stored), "cuda")

    assert [each.verdict for each in again] == ["FAIL", "NOT MEASURED", "ERROR"]
    assert [each.verdict for each in recorded_results(stored)] == [each.verdict for each in results]
    assert verdict_of(again) == stored["verdict"] == "ERROR"


def test_a_recorded_value_is_judged_by_the_bar_of_today(ledger):
    entry = ledger.append(verdict(error=5e-7))
    stricter = [Check("error", "<=", 1e-7)]
    assert judge(stricter, recorded_values(entry), "cpu")[0].verdict == "FAIL"


def test_a_ledger_that_is_no_file_is_one_line(tmp_path):
    (tmp_path / "ledger.jsonl").symlink_to("/dev/zero")
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for use in (ledger.entries, lambda: ledger.append({"kind": "verdict"})):
        with pytest.raises(UsageError, match="is not a regular file"):
            use()
