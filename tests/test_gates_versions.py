"""A verdict goes stale with another major or minor version of what compiles or runs kernels."""

import pytest

from gates.judging.find import find_gates
from gates.judging.judge import judge
from gates.judging.ledger import Ledger, verdict_entry
from gates.judging.measure import Setting, gate_fingerprint, standing
from gates.judging.versions import changed_versions, differing_versions, facts_here
from xtrain.config.check import Check
from xtrain.track.machine import device_facts

CHECK = Check("error", "<=", 1.0)
VERSIONS = {"numpy": "2.4.6", "numba": "0.68.0", "cupy-cuda13x": "14.2.0", "mlflow": "3.1.0"}


def facts(driver="580.159.04", **changed):
    versions = {**VERSIONS, **{name.replace("_", "-"): v for name, v in changed.items()}}
    return {"versions": versions, "gpu": {"driver": driver}}


@pytest.mark.parametrize(
    ("device", "now", "said"),
    [
        ("cpu", facts(numpy="2.5.0"), ["numpy 2.4 to 2.5"]),
        ("cpu", facts(numpy="2.4.9"), []),
        ("cpu", facts(numba="1.68.0"), ["numba 0.68 to 1.68"]),
        ("cpu", facts(mlflow="4.0.0"), []),
        ("cpu", facts(cupy_cuda13x="15.0.0"), []),
        ("cuda", facts(cupy_cuda13x="14.3.0"), ["cupy-cuda13x 14.2 to 14.3"]),
        ("cuda", facts(driver="590.1"), ["driver 580 to 590"]),
        ("cuda", facts(driver="580.200.1"), []),
        ("cpu", {"versions": {}}, []),
    ],
)
def test_only_a_deciding_version_makes_a_verdict_stale(device, now, said):
    assert differing_versions(facts(), now, device) == said


def test_a_verdict_records_the_versions_and_goes_stale_with_them(tmp_path):
    file = find_gates()["t3"]
    ledger = Ledger(tmp_path / "ledger.jsonl")
    setting = Setting("cpu", tmp_path, ledger, lambda *a: ([CHECK], "", ""), tmp_path / "none")
    fingerprint = gate_fingerprint(file, setting)
    for numpy, verdict in ((None, "PASS"), ("1.0.0", "STALE")):
        found = device_facts("cpu")
        assert {"numpy", "numba"} <= found["versions"].keys()
        if numpy:
            found["versions"] = {**found["versions"], "numpy": numpy}
        results = judge([CHECK], {"error": 0.0}, "cpu")
        entry = verdict_entry("T3", results, device="cpu", fingerprint=fingerprint, facts=found)
        ledger.append(entry)
        known = standing(file, setting)
        assert known.verdict == verdict
    assert "numpy 1.0 to" in known.results[0].reason


@pytest.mark.skipif(facts_here("cuda") is not None, reason="there is a GPU here")
def test_a_verdict_of_a_device_that_is_not_here_is_compared_with_nothing():
    assert changed_versions({"facts": facts(numpy="1.0.0")}, "cuda") == []
