"""`xtrain-prune` deletes what nothing needs, and says so first."""

import pytest

from gates.judging.judge import judge
from gates.judging.ledger import Ledger
from gates.judging.promote import promote_or_refuse
from pipelines.prune import main
from xtrain.config.check import Check
from xtrain.track.run_dir import open_run


def made(root, status="FINISHED", run="v0", margin=None):
    """A run with a checkpoint; margin: what it was judged on, above 0.5 promotes it."""
    out = open_run(root, run, "pretrain", {}, config_text="", fingerprints={}, facts={})
    for part in ("checkpoints/20", "export"):
        (out.path / part).mkdir(parents=True)
        (out.path / part / "model.safetensors").write_bytes(bytes(500_000))
    out.log(1, {"loss": 1.0})
    if margin is not None:
        results = judge([Check("margin", ">=", 0.5)], {"margin": margin}, "cpu")
        promote_or_refuse(
            out, results, requires={}, device="cpu", ledger=Ledger.of(root), fingerprints={}
        )
    if status != "RUNNING":
        out.set_status(status)
    return out


@pytest.fixture
def many(tmp_path):
    """Two that nothing needs, and five of which each is kept for its own reason."""
    useless = [made(tmp_path), made(tmp_path, margin=0.4)]
    kept = [
        made(tmp_path, margin=0.6),
        made(tmp_path, "KILLED"),
        made(tmp_path, "FAILED"),
        made(tmp_path, "RUNNING"),
        made(tmp_path, run="v1"),
        made(tmp_path),
    ]
    return useless, kept


def has_checkpoints(run):
    return (run.path / "checkpoints" / "20" / "model.safetensors").exists()


def test_old_checkpoints_are_deleted_and_what_is_needed_is_kept(many, tmp_path, capsys):
    useless, kept = many
    assert main(["--out", str(tmp_path), "--delete"]) == 0
    assert not any(has_checkpoints(run) for run in useless)
    assert all(has_checkpoints(run) for run in kept)
    for run in useless:
        assert (run.path / "metrics.jsonl").exists() and (run.path / "export").is_dir()
    shown = capsys.readouterr().out
    assert all(str(run.path) in shown for run in useless) and "1.0 MB in all" in shown


def test_without_delete_it_only_says_so(many, tmp_path, capsys):
    useless, kept = many
    assert main(["--out", str(tmp_path)]) == 0
    assert all(has_checkpoints(run) for run in (*useless, *kept))
    shown = capsys.readouterr().out
    assert shown.count("would delete") == 2 and "--delete deletes" in shown


def test_a_broken_ledger_deletes_nothing(many, tmp_path, capsys):
    useless, kept = many
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"PASS"', '"FAIL"', 1))
    assert main(["--out", str(tmp_path), "--delete"]) == 2
    assert all(has_checkpoints(run) for run in (*useless, *kept))
    assert "nothing is deleted" in capsys.readouterr().err


def test_a_link_in_place_of_checkpoints_is_not_followed(many, tmp_path, capsys):
    (run, _), _ = many
    (run.path / "checkpoints").rename(tmp_path / "elsewhere")
    (run.path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    assert main(["--out", str(tmp_path), "--delete"]) == 2
    assert (tmp_path / "elsewhere" / "20" / "model.safetensors").exists()
