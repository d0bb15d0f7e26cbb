"""The curves of one run as a picture: training and held-out loss, learning rate, speed."""

from pathlib import Path

from xtrain.track.run_dir import RunDir, read_metrics


def plot_run(out: RunDir) -> Path:
    """Write curves.png into the run directory from its metrics.jsonl; returns its path."""
    from matplotlib.figure import Figure  # takes a second to import

    records = read_metrics(out.path / "metrics.jsonl", "train")
    held_out = read_metrics(out.path / "metrics.jsonl", "eval")
    tokens_per_step = records[-1]["tokens"] / records[-1]["step"] if records else 1.0
    figure = Figure(figsize=(9, 6), layout="constrained")
    loss, rate, speed = figure.subplot_mosaic(
        [["loss", "loss"], ["lr", "tok_s"]], height_ratios=(2, 1)
    ).values()
    tokens = [r["tokens"] for r in records]
    loss.plot(tokens, [r["loss"] for r in records], linewidth=0.8, label="training")
    loss.plot(
        [r["step"] * tokens_per_step for r in held_out],
        [r["loss"] for r in held_out],
        marker="o",
        label="held out",
    )
    loss.set(xlabel="tokens", ylabel="nats a token", title=f"{out.manifest['run']} {out.id}")
    loss.legend()
    rate.plot(tokens, [r["lr"] for r in records])
    rate.set(xlabel="tokens", ylabel="learning rate")
    speed.plot(tokens, [r["tok_s"] for r in records], linewidth=0.8)
    speed.set(xlabel="tokens", ylabel="tokens a second", ylim=(0, None))
    path = out.path / "curves.png"
    figure.savefig(path, dpi=120)
    return path
