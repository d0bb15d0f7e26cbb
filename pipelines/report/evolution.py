"""`xtrain-report`: the evolution ledger, written from what was measured instead of remembered.

    evolution.md   phases and runs over the axes algorithm, architecture, infra and data
    losses.png     held-out loss of every run over its tokens
    index.html     the same page in one file, the picture inside

Phases come from conf/phase, their verdicts from the ledger and the committed evidence; runs from
their directories, which MLflow mirrors. Nothing here measures anything.
"""

import argparse
import base64
import html
import math
import sys
from pathlib import Path

from gates.judging.find import GateFile, find_gates
from gates.judging.judge import NOT_MEASURED, CheckResult
from gates.judging.ledger import Ledger
from gates.judging.measure import Setting, Standing, standing
from gates.judging.table import show_bar, show_value
from pipelines.report.plots import new_figure, tokens_per_step
from xtrain.command.ending import run_command
from xtrain.config.bars import gate_checks
from xtrain.config.compose import load_saved
from xtrain.config.files import choices
from xtrain.config.schema import RunConfig
from xtrain.errors import UsageError
from xtrain.models.counts import count_parameters
from xtrain.track.mlflow_copy import read_note
from xtrain.track.run_dir import RunDir, all_runs, read_metrics, value_of, write_atomically

PHASES = ("phase", "what", "cpu", "cuda", "measured against its bars (the original's figure)")
RUNS = (
    "run",
    "architecture: core / total",
    "data: tokens, epochs",
    "algorithm",
    "infra: device, tok/s",
    "held-out loss",
    "verdict",
    "directory",
)


def main(arguments: list[str] | None = None) -> int:
    """Write the report; returns the exit code."""
    return run_command("xtrain-report", _main, arguments)


def _main(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="xtrain-report", description="Write the evolution ledger of all phases and runs."
    )
    parser.add_argument("--out", default="outputs/report", type=Path, metavar="DIR")
    parser.add_argument(
        "--root", default="outputs", type=Path, metavar="DIR", help="root of the runs"
    )
    options = parser.parse_args(arguments)
    for path in write_report(options.root, options.out):
        print(path)
    return 0


def write_report(root: Path, out: Path) -> list[Path]:
    """Write the three files into `out`; returns their paths. Raises UsageError.

    A run whose files cannot be read is said on stderr and left out.
    """
    ledger = Ledger.of(root)
    phases = phase_rows(root, ledger)
    rows, runs = [], []
    for run in all_runs(root, say=_say):
        if (run.path / "metrics.jsonl").exists():
            try:
                rows.append(run_row(run, ledger))
                runs.append(run)
            except UsageError as error:
                _say(f"{error}; the run is left out")
    out.mkdir(parents=True, exist_ok=True)
    picture = plot_losses(runs, out / "losses.png")
    page = write_atomically(out / "evolution.md", _markdown(phases, rows))
    index = write_atomically(out / "index.html", _html(phases, rows, picture))
    return [page, picture, index]


def phase_rows(root: Path, ledger: Ledger) -> list[tuple[str, ...]]:
    """One row a phase: its claim, its verdict on both device classes, what was measured."""
    files = find_gates()
    rows = []
    for name in choices("phase"):
        checks, title, _ = gate_checks(name)
        if not checks:
            continue  # a stage, not a claim
        known = [_known(files.get(name), root, ledger, device) for device in ("cpu", "cuda")]
        best = {
            r.check.name: r for each in known if each for r in each.results if r.value is not None
        }
        shown = [_shown(best[c.name]) for c in checks if c.name in best]
        verdicts = [each.verdict if each else NOT_MEASURED for each in known]
        rows.append((name.upper(), title, *verdicts, "; ".join(shown)))
    return rows


def run_row(run: RunDir, ledger: Ledger) -> tuple[str, ...]:
    """One row a run directory."""
    config = load_saved(run.path / "config.yaml")
    counts = count_parameters(config.model, qk_norm=config.features.qk_norm)
    train = read_metrics(run.path / "metrics.jsonl", "train")
    held_out = read_metrics(run.path / "metrics.jsonl", "eval")
    last = train[-1] if train else {"tokens": 0, "epoch": 0.0}
    tokens, epochs = value_of(last, "tokens"), value_of(last, "epoch")
    speeds = sorted(v for r in train if math.isfinite(v := value_of(r, "tok_s"))) or [0.0]
    return (
        f"{config.name} / {config.phase.name}",
        f"{_architecture(config)}: {_millions(counts.core)} / {_millions(counts.total)}",
        f"{config.data.name}: {_millions(tokens)}, {epochs:.2f}",
        f"{config.features.precision}, lr {config.optim.lr:g}, seed {config.seed}",
        f"{config.device}, {speeds[len(speeds) // 2]:,.0f}",
        f"{value_of(held_out[-1], 'loss'):.4f}" if held_out else "",
        _promotion(run, ledger),
        f"{run.path.name} {read_note(run.path).get('run_id') or ''}".strip(),
    )


def plot_losses(runs: list[RunDir], path: Path) -> Path:
    """Held-out loss over tokens, one line a run."""
    figure = new_figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        train = read_metrics(run.path / "metrics.jsonl", "train")
        held_out = read_metrics(run.path / "metrics.jsonl", "eval")
        if not train or not held_out:
            continue
        per_step = tokens_per_step(train)
        axes.plot(
            [record["step"] * per_step for record in held_out],
            [value_of(record, "loss") for record in held_out],
            marker=".",
            label=f"{run.manifest['run']} {run.id}",
        )
    axes.set(xlabel="tokens", ylabel="held-out loss, nats a token")
    if axes.lines:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return path


def _say(line: str) -> None:
    print(f"xtrain-report: {line}", file=sys.stderr)


def _known(file: GateFile | None, root: Path, ledger: Ledger, device: str) -> Standing | None:
    return None if file is None else standing(file, Setting(device, root, ledger, gate_checks))


def _shown(result: CheckResult) -> str:
    check = result.check
    original = f" ({check.original})" if check.original else ""
    value = show_value(result.value, check.unit)
    return f"{check.name} {value} {show_bar(check)}{original}"


def _architecture(config: RunConfig) -> str:
    m = config.model
    heads = f"{m.num_attention_heads}h/{m.num_key_value_heads}kv"
    return f"{m.hidden_size} / {m.num_hidden_layers}L / {heads} / {m.intermediate_size}"


def _promotion(run: RunDir, ledger: Ledger) -> str:
    decisions = [
        entry
        for entry in ledger.entries()
        if entry["kind"] == "promotion" and entry.get("run") == str(run.path)
    ]
    if not decisions:
        return run.manifest["status"]
    return "promoted" if decisions[-1]["verdict"] == "PASS" else "refused"


def _millions(number: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def _markdown(phases: list, runs: list) -> str:
    return "\n".join(
        [
            "# Evolution",
            "",
            "Written by `xtrain-report` from the ledger, the committed evidence and the run "
            "directories.",
            "",
            "## Phases",
            "",
            *_markdown_table(PHASES, phases),
            "",
            "## Runs",
            "",
            *_markdown_table(RUNS, runs),
            "",
            "Losses compare only between runs on the same held-out set.",
            "",
            "![held-out losses](losses.png)",
            "",
        ]
    )


def _markdown_table(columns: tuple, rows: list) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return lines + ["| " + " | ".join(c.replace("|", "/") for c in row) + " |" for row in rows]


def _html(phases: list, runs: list, picture: Path) -> str:
    image = base64.b64encode(picture.read_bytes()).decode()
    return f"""<!doctype html>
<meta charset="utf-8"><title>xtrain evolution</title>
<style>body {{ font: 14px/1.5 sans-serif; max-width: 1400px; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse }} td, th {{ border: 1px solid #ccc; padding: 3px 8px;
text-align: left; vertical-align: top }} .PASS, .promoted {{ color: #087f23 }}
.FAIL, .ERROR, .refused {{ color: #b00020 }} .STALE {{ color: #b26a00 }}</style>
<h1>Evolution</h1>
<h2>Phases</h2>{_html_table(PHASES, phases)}
<h2>Runs</h2>{_html_table(RUNS, runs)}
<p>Losses compare only between runs on the same held-out set.</p>
<img alt="held-out losses" src="data:image/png;base64,{image}">
"""


def _html_table(columns: tuple, rows: list) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{html.escape(c.split(" ")[0])}">{html.escape(c)}</td>' for c in row)
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


if __name__ == "__main__":
    sys.exit(main())
