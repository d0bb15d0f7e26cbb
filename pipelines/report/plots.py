"""The curves of one run as a picture: training and held-out loss, learning rate, speed."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from xtrain.track.run_dir import RunDir, read_metrics, value_of


def new_figure(**layout):
    """An empty figure; a home directory that cannot be written, for its cache, is no news."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.figure import Figure  # takes a second to import

    return Figure(**layout)


def tokens_per_step(records: Sequence[Mapping]) -> float:
    """Tokens that a step took, from the last of the training's records; 1 without one."""
    return value_of(records[-1], "tokens") / max(records[-1]["step"], 1) if records else 1.0


def plot_run(out: RunDir) -> Path:
    """Write curves.png into the run directory from its metrics.jsonl; returns its path."""
    records = read_metrics(out.path / "metrics.jsonl", "train")
    held_out = read_metrics(out.path / "metrics.jsonl", "eval")
    per_step = tokens_per_step(records)
    figure = new_figure(figsize=(9, 6), layout="constrained")
    loss, rate, speed = figure.subplot_mosaic(
        [["loss", "loss"], ["lr", "tok_s"]], height_ratios=(2, 1)
    ).values()
    tokens = [value_of(r, "tokens") for r in records]
    loss.plot(tokens, [value_of(r, "loss") for r in records], linewidth=0.8, label="training")
    loss.plot(
        [r["step"] * per_step for r in held_out],
        [value_of(r, "loss") for r in held_out],
        marker="o",
        label="held out",
    )
    loss.set(xlabel="tokens", ylabel="nats a token", title=f"{out.manifest['run']} {out.id}")
    loss.legend()
    rate.plot(tokens, [value_of(r, "lr") for r in records])
    rate.set(xlabel="tokens", ylabel="learning rate")
    speed.plot(tokens, [value_of(r, "tok_s") for r in records], linewidth=0.8)
    speed.set(xlabel="tokens", ylabel="tokens a second", ylim=(0, None))
    path = out.path / "curves.png"
    figure.savefig(path, dpi=120)
    return path
