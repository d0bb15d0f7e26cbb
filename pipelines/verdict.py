"""The end of a run: samples, export, its gate, the gates it requires, promotion or refusal."""

from collections.abc import Callable

from gates.judging.finished_run import (
    judge_run,
    setting_of,
    settle_phase,
    settle_required,
)
from gates.judging.judge import PASS
from gates.judging.ledger import check_record
from gates.judging.measure import Setting, Standing
from gates.judging.outlook import PROMOTING
from gates.judging.promote import promote_or_refuse
from gates.judging.table import CHECK_COLUMNS, check_rows, print_table
from pipelines.export import export_model
from pipelines.pretrain import sample
from pipelines.report.plots import plot_run
from xtrain.assemble.learner import Learner
from xtrain.command.streams import shown
from xtrain.config.schema import RunConfig
from xtrain.track.mirror import Mirror
from xtrain.track.run_dir import RunDir

Say = Callable[[str], None]


def conclude(run: RunConfig, learner: Learner, out: RunDir, mirror: Mirror, say: Say) -> int:
    """Finish a trained run; returns 0, or 3 when a gate refuses it. The table goes to stdout.

    The learner gives up its memory step by step, for what is measured after it.
    """
    learner.keep_weights_()
    samples = [f"[{prompt}]{text}\n" for prompt, text in sample(run, learner)]
    out.write_text("samples.txt", "".join(samples))
    for text in samples:
        say(f"sample: {text.rstrip()}")
    if run.features.qk_norm:  # without it there is no such architecture on Hugging Face
        export_model(learner.model, learner.buffers, out.path / "export", run.data.tokenizer)
        mirror.artifact(out.path / "export", "export")
    learner.release_()
    mirror.artifact(plot_run(out), "plots")
    mirror.artifact(out.path / "samples.txt")
    mirror.artifact(out.path / "config.yaml")
    setting = setting_of(run)
    if run.phase.name != PROMOTING:
        return _judge_phase(run, setting, say)
    return _judge_run(run, out, setting, mirror, say)


def _judge_phase(run: RunConfig, setting: Setting, say: Say) -> int:
    """A run as of a phase has nothing to promote; its exit code is the phase's own gate's."""
    known = settle_phase(run.phase.name, setting, say)
    if known is None:
        say(f"phase {run.phase.name} has no gate to run here")
        return 0
    return 0 if _show(known) else 3


def _judge_run(run: RunConfig, out: RunDir, setting: Setting, mirror: Mirror, say: Say) -> int:
    say(f"measuring run {run.name} again from its checkpoint")
    judged = judge_run(run, out.path, setting)
    out.write_json("gates.json", [check_record(result) for result in judged.results])
    mirror.artifact(out.path / "gates.json")
    requires = settle_required(judged, setting, say)
    print_table(CHECK_COLUMNS, check_rows(judged.results, run.name))
    print()
    _show(requires, tables=False)
    print(shown(f"bars {judged.bars}"))
    if not run.promote:
        print(f"{run.name} {judged.verdict}, not promoted (promote=false)")
        return 0 if judged.verdict == PASS else 3
    promotion = promote_or_refuse(
        out,
        judged.results,
        requires=requires,
        device=run.device,
        ledger=setting.ledger,
        fingerprints=judged.fingerprint,
        bars=judged.bars,
        beside=judged.beside,
        mirror=mirror,
    )
    for note in promotion.notes:
        say(note)
    if promotion.promoted:
        version = f" version {promotion.version}" if promotion.version else ""
        print(f"{run.name} PASS: promoted as models:/xtrain-{run.name}@promoted{version}")
        return 0
    print(shown(f"{run.name} REFUSED: " + "; ".join(promotion.reasons)))
    return 3


def _show(known: dict[str, Standing], *, tables: bool = True) -> bool:
    """Print what stands for some gates; returns whether all of them PASS."""
    for gate, each in known.items():
        if tables:
            print_table(CHECK_COLUMNS, check_rows(each.results, gate))
    if known:
        print("gates " + ", ".join(f"{gate} {each.verdict}" for gate, each in known.items()))
    return all(each.verdict == PASS for each in known.values())
