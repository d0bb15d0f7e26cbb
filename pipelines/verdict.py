"""The end of a run: samples, export, its gate, the gates it requires, promotion or refusal."""

from collections.abc import Callable
from pathlib import Path

from gates.judging.find import choose_gates, find_gates
from gates.judging.fingerprint import code_fingerprint
from gates.judging.judge import PASS, judge, verdict_on
from gates.judging.ledger import Ledger, check_record, verdict_entry
from gates.judging.measure import Bench, Standing, settle
from gates.judging.outlook import PROMOTING, missing_gates, no_bar_on_loss
from gates.judging.promote import promote_or_refuse
from gates.judging.table import CHECK_COLUMNS, check_rows, print_table
from gates.trained_run import fingerprints, label_of, measure_run, sets_of
from pipelines.export import export_model
from pipelines.pretrain import sample
from pipelines.report.plots import plot_run
from xtrain.assemble.learner import Learner
from xtrain.command.streams import shown
from xtrain.config.bars import (
    gate_checks,
    run_gate,
    whose_bars,
    without_checks_of_other_data,
)
from xtrain.config.schema import RunConfig
from xtrain.track.machine import device_facts
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
    ledger = Ledger.of(run.out)
    bench = Bench(run.device, Path(run.out), ledger, gate_checks)
    if run.phase.name != PROMOTING:
        return _judge_phase(run, bench, say)
    return _judge_run(run, out, bench, mirror, say)


def _judge_phase(run: RunConfig, bench: Bench, say: Say) -> int:
    """A run as of a phase has nothing to promote; its exit code is the phase's own gate's."""
    files = find_gates()
    if run.phase.name not in files:
        say(f"phase {run.phase.name} has no gate to run here")
        return 0
    known = settle(choose_gates([run.phase.name], files), bench, say)
    return 0 if _show(known) else 3


def _judge_run(run: RunConfig, out: RunDir, bench: Bench, mirror: Mirror, say: Say) -> int:
    files = find_gates()
    gate = run_gate(run)
    label = label_of(out.path, gate)
    say(f"measuring run {run.name} again from its checkpoint")
    applying = without_checks_of_other_data(gate, label)
    measured = measure_run(out.path, run.device, bench.out, sets_of(applying))
    results = judge(applying.checks, measured, run.device)
    facts = fingerprints(out.path)
    if run.name in files:
        file = files[run.name]
        facts["code"] = code_fingerprint(file.path, file.load().composes, device=run.device)
    bars = whose_bars(run)
    entry = verdict_entry(
        run.name,
        results,
        device=run.device,
        fingerprint=facts,
        facts=device_facts(run.device),
    )
    bench.ledger.append({**entry, "bars": bars})
    out.write_json("gates.json", [check_record(result) for result in results])
    mirror.artifact(out.path / "gates.json")
    beside = [*no_bar_on_loss(run, gate, label), *missing_gates(gate)]
    # What is refused already needs no gates of phases measured.
    wanted = [] if beside else gate.requires
    requires = settle(choose_gates(wanted, files), bench, say)
    print_table(CHECK_COLUMNS, check_rows(results, run.name))
    print()
    _show(requires, tables=False)
    print(shown(f"bars {bars}"))
    if not run.promote:
        verdict = verdict_on(run.device, results)
        print(f"{run.name} {verdict}, not promoted (promote=false)")
        return 0 if verdict == PASS else 3
    promotion = promote_or_refuse(
        out,
        results,
        requires=requires,
        device=run.device,
        ledger=bench.ledger,
        fingerprints=facts,
        bars=bars,
        beside=beside,
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
