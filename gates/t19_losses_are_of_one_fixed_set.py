"""T19: a loss is of one fixed set, and losses of different sets are not compared.

Claim   The embedded set is a file whose sha256 stands in its recipe, the same whenever it is made;
        a damaged one is refused. No document of it is in what data=sotu trains on, whole or sliced.
        The loss on it is the same in batches of 1, 7 and 32. Two results are compared when their
        sets have one sha256, and otherwise refused with both.
Why     A held-out set that moves with the data makes every comparison of two runs worthless.
Reads   conf/eval/sotu_v1, conf/data/sotu and the speeches of the package sotu.
Needs   A CPU or one CUDA device. About 15 seconds, most of it tokenising.
"""

import contextlib
import hashlib
import itertools
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from gates.judging.gate import Defect, Gate
from xtrain.assemble import learner as learning
from xtrain.config.bars import official
from xtrain.config.rules import resolve_features
from xtrain.data import dataset, eval_set
from xtrain.data.eval_set import EvalSet, EvalSetConfig, compare, open_eval_set, read_eval_set
from xtrain.errors import UsageError

BATCHES = (1, 7, 32)
TOKENS = 2_500  # of windows of 64: the last window is ragged, and the last batch of 7 and of 32
SLICES = (None, 3_000_000, 200_000)  # bytes of text: all, as v0, and too few documents for a tenth
HEADER_BYTES = 256  # of a token file, before what is hashed


def batches(device: str) -> dict[str, float]:
    """How far the losses in batches of different sizes are apart, with a random model of v0."""
    run = replace(official("v0"), device=device)
    model = replace(run.model, initializer_range=0.2)  # so that the words' losses are far apart
    run = replace(run, model=model, features=resolve_features(run, device))
    learner = learning.build(run)
    losses = []
    with _made(run.eval) as chosen:
        for rows in BATCHES:
            sized = replace(run, train=replace(run.train, batch_size=rows))
            losses.append(learning.measure_on_set(sized, learner, chosen, TOKENS)["loss"])
    return {"eval_batch_size_rel": (np.max(losses) - np.min(losses)) / np.min(losses)}


def one_file(device: str) -> dict[str, float]:
    """Of the set made twice: files whose sha256 is not the recipe's, and damaged ones accepted."""
    cfg = official("v0").eval
    unchecked = replace(cfg, sha256=None)  # the comparison is made here
    with _made(unchecked) as first, _made(unchecked) as second:
        found = [_payload_sha256(each.shard.path) for each in (first, second)]
        found += [first.manifest["sha256"], second.manifest["sha256"]]
        mismatches = sum(each != cfg.sha256 for each in found) + _accepted_damaged(first)
    return {"eval_set_sha256_mismatches": float(mismatches)}


def unseen(device: str) -> dict[str, float]:
    """Documents of the set that begin like a document of what some slice trains on."""
    run = official("v0")
    with _made(run.eval) as chosen, tempfile.TemporaryDirectory() as folder:
        ours = _beginnings(chosen.shard, skip=1)
        seen = set()
        for size in SLICES:
            cfg = replace(run.data, max_bytes=size)
            seen |= ours & _beginnings(dataset.prepare(cfg, cache_dir=folder).train)
    return {"eval_documents_trained_on": float(len(seen))}


def comparisons(device: str) -> dict[str, float]:
    """Comparisons of different sets that are allowed or do not name both, and of one that are not.

    The foreign sets have the same name: one of fewer tokens, one with one other token.
    """
    cfg = official("v0").eval
    shorter = replace(cfg, tokens=5_000, sha256=None)
    with _made(cfg) as whole, _made(cfg) as again, _made(shorter) as short:
        altered = hashlib.sha256(b"one other token").hexdigest()
        ours = {"set": whole.manifest, "loss": 3.0, "standard_error": 0.1}
        foreign = [short.manifest, whole.manifest | {"sha256": altered}]
        allowed = sum(not _refused(ours, ours | {"set": other}) for other in foreign)
        renamed = again.manifest | {"name": "another name"}
        refused = sum(_refused(ours, ours | {"set": each}) for each in (again.manifest, renamed))
    return {
        "foreign_comparisons_allowed": float(allowed),
        "own_comparisons_refused": float(refused),
    }


def _refused(one: dict, other: dict) -> bool:
    """Whether a comparison is refused in words that hold both fingerprints."""
    try:
        compare(one, other)
    except UsageError as error:
        return all(each["set"]["sha256"] in str(error) for each in (one, other))
    return False


@contextlib.contextmanager
def _made(cfg: EvalSetConfig):
    """The set made anew in a directory of its own."""
    with tempfile.TemporaryDirectory() as folder:
        yield open_eval_set(cfg, cache_dir=folder)


def _payload_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()[HEADER_BYTES:]).hexdigest()


def _accepted_damaged(chosen: EvalSet) -> int:
    """1 when the set still opens after one bit of one token was turned."""
    raw = bytearray(chosen.shard.path.read_bytes())
    raw[HEADER_BYTES + 1000] ^= 1
    chosen.shard.path.write_bytes(raw)
    try:
        read_eval_set(chosen.shard.path.parent)
    except UsageError:
        return 0
    return 1


def _beginnings(shard, skip: int = 0) -> set[bytes]:
    """The first 200 tokens of each document; skip: tokens to leave out of the first one."""
    starts = [int(x) for x in shard.offsets]
    starts[0] += skip
    return {
        np.asarray(shard.tokens[a : min(a + 200, b)]).tobytes()
        for a, b in itertools.pairwise(starts)
    }


def _batches_weigh_alike():
    """The mean over batches of each one's mean, as a training loop's own log has it."""

    def wrong(model, source, *, batch_size, device):
        parts = [
            sound(model, _One(batch), batch_size=batch_size, device=device)
            for batch in source.batches(batch_size)
        ]
        loss = math.fsum(each.loss for each in parts) / len(parts)
        return replace(parts[0], loss=loss, tokens=sum(each.tokens for each in parts))

    sound = learning.evaluate
    return mock.patch.object(learning, "evaluate", wrong)


class _One:
    """A source of one batch."""

    def __init__(self, batch):
        self.batch = batch

    def batches(self, batch_size: int):
        return [self.batch]


def _documents_are_not_ended():
    sound = eval_set._documents
    return mock.patch.object(
        eval_set,
        "_documents",
        lambda *arguments: (ids[:-1] for ids in sound(*arguments)),
    )


def _training_holds_out_the_first_of_ten():
    """Training leaves out documents 0, 10, ..., the set is still made of 9, 19, ..."""

    def wrong(encoded, fraction, *, limit=None):
        every = round(1 / fraction)
        for index, ids in enumerate(encoded):
            yield int(index % every == 0), ids

    return mock.patch.object(dataset, "hold_out", wrong)


def _names_decide():
    def wrong(one, other):
        if one["set"]["name"] != other["set"]["name"]:
            raise UsageError("other sets")

    return mock.patch.object(eval_set, "require_same_set", wrong)


def _nothing_is_compared():
    def wrong(one, other):
        hashes = (each["set"]["sha256"] for each in (one, other))
        raise UsageError(f"never: {' '.join(hashes)}")

    return mock.patch.object(eval_set, "require_same_set", wrong)


GATE = Gate(
    "T19",
    "Fixed evaluation set",
    measures=(batches, one_file, unseen, comparisons),
    defects=(
        Defect("batch means", "eval_batch_size_rel", batches, _batches_weigh_alike),
        Defect("no ends", "eval_set_sha256_mismatches", one_file, _documents_are_not_ended),
        Defect(
            "other held out",
            "eval_documents_trained_on",
            unseen,
            _training_holds_out_the_first_of_ten,
        ),
        Defect("names", "foreign_comparisons_allowed", comparisons, _names_decide),
        Defect("never", "own_comparisons_refused", comparisons, _nothing_is_compared),
    ),
    composes=("run/v0", "model/v0", "data/sotu", "eval/sotu_v1"),
)
