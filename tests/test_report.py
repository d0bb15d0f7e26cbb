"""`xtrain-report` writes what the ledger and the run directories hold."""

import os
import subprocess
import sys
from pathlib import Path

from pipelines.report.evolution import main
from xtrain.config.compose import compose, load_run, resolved_yaml
from xtrain.track.run_dir import open_run


def a_run(root):
    run = load_run(compose(["run=v0", "device=cpu"]))
    out = open_run(
        root,
        "v0",
        "pretrain",
        {},
        config_text=resolved_yaml(run),
        fingerprints={},
        facts={},
    )
    train = {"loss": 9.0, "tok_s": 1000.0, "tokens": 5120, "epoch": 0.01}
    out.log(10, train)
    out.log(10, {"loss": 9.1234}, kind="eval")
    out.set_status("FINISHED")
    out.close()
    return out


def test_the_report_names_every_phase_and_run(tmp_path, capsys):
    root, out = tmp_path / "outputs", tmp_path / "report"
    run = a_run(root)
    assert main(["--root", str(root), "--out", str(out)]) == 0
    page = (out / "evolution.md").read_text()
    assert "| T5 |" in page and "| T13 |" in page
    assert "41.4K / 3.26M" in page and "9.1234" in page and run.id in page
    assert capsys.readouterr().out.split() == [
        str(out / name) for name in ("evolution.md", "losses.png", "index.html")
    ]


def test_runs_that_cannot_be_read_are_said_and_left_out(tmp_path, capsys):
    root, out = tmp_path / "outputs", tmp_path / "report"
    sound, manifest, config, metrics, note, bare = (a_run(root) for _ in range(6))
    (manifest.path / "manifest.json").write_text("[1]")
    (config.path / "config.yaml").write_text("seed: [1]")
    (metrics.path / "metrics.jsonl").write_text("spoilt\n")
    (note.path / "mirror.json").write_text("[1]")
    (bare.path / "metrics.jsonl").write_text('{"step": 0, "kind": "train"}\n')

    assert main(["--root", str(root), "--out", str(out)]) == 0

    page = (out / "evolution.md").read_text()
    assert sound.id in page and bare.id in page
    said = capsys.readouterr().err.splitlines()
    for run, name in ((manifest, "manifest"), (config, "config"), (metrics, "metrics")):
        assert run.id not in page
        assert sum(f"{run.id}/{name}" in line for line in said) == 1
    assert note.id not in page and any(f"{note.id}/mirror.json is damaged" in each for each in said)


def test_a_home_that_cannot_be_written_is_no_news(tmp_path):
    draw = "from pipelines.report.plots import new_figure; new_figure().savefig('x.png')"
    environment = {**os.environ, "HOME": "/proc/none", "PYTHONPATH": str(Path(__file__).parents[1])}
    for name in ("MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        environment.pop(name, None)
    command = [sys.executable, "-c", draw]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_html_page_holds_its_picture(tmp_path):
    assert main(["--root", str(tmp_path / "none"), "--out", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert "data:image/png;base64," in page and "losses.png" not in page
