"""`xtrain-report` writes what the ledger and the run directories hold."""

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


def test_the_html_page_holds_its_picture(tmp_path):
    assert main(["--root", str(tmp_path / "none"), "--out", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert "data:image/png;base64," in page and "losses.png" not in page
