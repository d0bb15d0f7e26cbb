"""Measure a trained model on a named set: `xtrain run=v0 phase=eval eval=sotu_v1`.

The model is the run's promoted one, or the checkpoint, run or export that `init_from=` names. The
result is eval.json in a run directory of its own, with the sha256 of the set and of the weights,
and `eval.against=` compares it with an earlier one of the same set.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from gates.judging.table import print_table
from pipelines.decode import check_room_to_ask, fitted, trained_learner, trained_model
from pipelines.end import end_run
from xtrain.assemble.learner import measure_on_set
from xtrain.assemble.origin import Origin, check_vocabulary
from xtrain.config.compose import resolved_yaml
from xtrain.config.identity import config_fingerprint
from xtrain.config.schema import RunConfig
from xtrain.data.dataset import data_cache
from xtrain.data.eval_set import compare, open_eval_set, require_same_set
from xtrain.data.tokenizers.imported import load_tokenizer
from xtrain.errors import Interrupted, UsageError
from xtrain.track.machine import device_facts
from xtrain.track.mirror import Mirror
from xtrain.track.room import room
from xtrain.track.run_dir import RunDir, open_run
from xtrain.track.store_address import check_store, store_uri
from xtrain.typed_json import read_json

RESULT = "eval.json"
RESULT_SHAPE = {
    "model": {"from": str},
    "set": {"name": str, "sha256": str},
    "loss": float,
    "standard_error": float,
    "perplexity": float,
    "bits_per_byte": float,
    "bits_per_byte_standard_error": float,
}
COLUMNS = ("model", "loss", "std. error", "perplexity", "bits/byte", "std. error", "set")


def evaluate_run(run: RunConfig, typed: Sequence[str], say: Callable[[str], None]) -> int:
    """Evaluate, write eval.json, print a table on stdout; returns 0.

    Raises UsageError when there is no such model or set, and when `eval.against` is of another set.
    """
    check_store(store_uri())
    earlier = None if run.eval.against is None else read_result(run.eval.against)
    origin = trained_model(run)
    run = fitted(run, origin, typed)
    check_vocabulary(run)
    check_room_to_ask(run, room() if run.device == "cpu" else None)
    tokenizer = load_tokenizer(run.data.tokenizer)
    cache = data_cache(Path(run.out)) / "eval"
    chosen = open_eval_set(run.eval, cache_dir=cache, tokenizer=tokenizer)
    say(f"set {run.eval.name}: {chosen.manifest['tokens']:,} tokens, sha256 {chosen.sha256}")
    if earlier is not None:
        require_same_set({"set": chosen.manifest}, earlier)
    if may_have_seen(origin, run):
        say(f"this model may have been trained on parts of {run.eval.name}: its data were cut")
    result = measure_on_set(run, trained_learner(run, origin), chosen)
    result["model"] = {"from": origin.said, **weights(origin)}
    out = open_run(
        run.out,
        run.name,
        run.phase.name,
        dataclasses.asdict(run),
        config_text=resolved_yaml(run),
        fingerprints={"config": config_fingerprint(run), "data": chosen.sha256},
        facts=device_facts(run.device),
    )
    record(out, result, say)
    print_table(COLUMNS, [row(result), *([row(earlier)] if earlier else [])])
    if earlier is not None:
        change, error = compare(result, earlier)
        print(f"difference {change:+.4f} nats a token, standard error {error:.4f} if independent")
    return 0


def read_result(path: str) -> dict:
    """The content of an eval.json, or of the one in a run directory. UsageError if it is none."""
    file = Path(path) / RESULT if Path(path).is_dir() else Path(path)
    try:
        return read_json(file, RESULT_SHAPE)
    except (FileNotFoundError, UsageError) as error:
        raise UsageError(f"eval.against={path}: not a result of phase=eval ({error})") from error


def may_have_seen(origin: Origin, run: RunConfig) -> bool:
    """Whether the model's own run held out other documents of the source than the set is made of.

    Only a checkpoint in its run directory tells; of an export nothing is known.
    """
    if origin.saved is None or origin.saved.data.source != run.eval.source:
        return False
    if run.eval.heldout_fraction is None:
        return False
    cut = ("order_seed", "heldout_fraction")
    return any(getattr(origin.saved.data, key) != getattr(run.eval, key) for key in cut)


def weights(origin: Origin) -> dict:
    """Where the weights are and one sha256 over their files."""
    digest = hashlib.sha256()
    for path in sorted(origin.path.glob("model*.safetensors")):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return {"path": str(origin.path), "weights_sha256": digest.hexdigest()}


def record(out: RunDir, result: dict, say: Callable[[str], None]) -> None:
    """Write a result into its run directory and to MLflow."""
    mirror = Mirror(out).start()
    ended = "FAILED"
    try:
        numbers = {k: v for k, v in result.items() if isinstance(v, float)}
        out.log(0, numbers | {"eval_tokens": result["tokens"]}, kind="eval")
        mirror.artifact(out.write_json(RESULT, result))
        mirror.tag("xtrain.eval_set", f"{result['set']['name']} {result['set']['sha256']}")
        ended = "FINISHED"
    except Interrupted:
        ended = "KILLED"
        raise
    finally:
        end_run(out, mirror, ended, say)
    say(f"wrote {out.path / RESULT}")


def row(result: dict) -> list[str]:
    """A result as a line of the table."""
    return [
        result["model"]["from"],
        f"{result['loss']:.4f}",
        f"{result['standard_error']:.4f}",
        f"{result['perplexity']:.2f}",
        f"{result['bits_per_byte']:.4f}",
        f"{result['bits_per_byte_standard_error']:.4f}",
        f"{result['set']['name']} {result['set']['sha256'][:12]}",
    ]
