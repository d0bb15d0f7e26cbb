"""T10: sequences go through together, with the numbers of one at a time.

Claim   Logits and gradients of a batch of sequences, documents kept apart or not, are those of the
        same sequences one after the other to rounding; at v2's size batches of 16 and 32 gain
        more over their sequences one by one than PyTorch's eager step gains from batching.
Why     A row that sees its neighbour, or weighs differently with the batch, still trains.
Reads   conf/model/v2 and conf/phase/t10, for the size and for what is on as of this phase.
Needs   A CPU for the numbers; for the speed one CUDA device that nobody else uses, and PyTorch
        (the extra `peers`). About 40 s.
"""

import functools
import importlib.util
from collections.abc import Mapping
from unittest import mock

import numpy as np

from gates.instruments import paired, tiny_run
from gates.judging.gate import Defect, Gate, NotMeasured
from xtrain.assemble.sized_step import Work
from xtrain.engine import device as devices
from xtrain.engine import ops
from xtrain.engine.tensor import Tensor
from xtrain.engine.testing import relative_error, worst
from xtrain.models.qwen3 import Qwen3
from xtrain.train.objectives.next_token import next_token

ROWS, TOKENS = 5, 37
SEQ = 256
BATCHES = (16, 32)


def numbers(device: str) -> dict[str, float]:
    """Worst distance of logits and of any parameter's gradient, with and without documents."""
    found = [_distances(device, documents) for documents in (False, True)]
    return {
        "batched_logits_max_abs": worst(logits for logits, _ in found),
        "batched_grads_rel": worst(gradient for _, gradient in found),
    }


def _distances(device: str, documents: bool) -> tuple[float, float]:
    here = devices.use(device)
    tiny = tiny_run.build(here)
    batch = _batch(documents)
    scale = np.float32(1 / (batch["targets"] >= 0).sum())
    together = _logits_and_gradients(tiny, here, [batch], scale)
    rows = [{name: array[b : b + 1] for name, array in batch.items()} for b in range(ROWS)]
    alone = _logits_and_gradients(tiny, here, rows, scale)
    logits = float(np.abs(together[0] - alone[0]).max())
    return logits, worst(map(relative_error, together[1], alone[1]))


def _batch(documents: bool) -> dict[str, np.ndarray]:
    """ROWS sequences with targets to ignore, unequally many a row; documents of random lengths."""
    source = np.random.default_rng(3)
    ids = source.integers(0, tiny_run.MODEL.vocab_size, (ROWS, TOKENS + 1)).astype(np.int32)
    batch = {"input_ids": ids[:, :-1].copy(), "targets": ids[:, 1:].copy()}
    ignored = source.random((ROWS, TOKENS)) < 0.1 * np.arange(ROWS)[:, None]
    batch["targets"][ignored] = -100
    if documents:
        begins = np.where(source.random((ROWS, TOKENS)) < 0.1, np.arange(TOKENS), 0)
        batch["starts"] = np.maximum.accumulate(begins, axis=1).astype(np.int32)
    return batch


def _logits_and_gradients(tiny, here, batches: list[dict], scale) -> tuple[np.ndarray, list]:
    """Logits of all rows, and the gradient of every parameter, summed over the batches."""
    tiny.buffers.grad[...] = 0
    logits = []
    for batch in batches:
        placed = {name: here.array(np.ascontiguousarray(a)) for name, a in batch.items()}
        hidden = tiny.model(placed["input_ids"], starts=placed.get("starts"))
        logits.append(here.host(tiny.model.logits(hidden).data).copy())
        next_token(tiny.model, placed, here.array(np.asarray(scale)), None).backward()
    names = tiny.buffers.parameters
    gradients = [here.host(tiny.buffers.view(tiny.buffers.grad, n)).copy() for n in names]
    return np.concatenate(logits), gradients


def speed(device: str) -> Mapping[str, float | NotMeasured]:
    """Time of v2's eager step, as of this phase, sequence after sequence over that of the batch;
    and that ratio over the one of PyTorch's eager step, all four timed in turn."""
    if device != "cuda":
        return {}
    here = devices.use(device)
    features = paired.as_of("t10", "v2", device).features
    names = [name for rows in BATCHES for name in (_gain(rows), _over_pytorch(rows))]
    declined = paired.busy(here)
    if declined:
        return dict.fromkeys(names, declined)
    found = {}
    for rows in BATCHES:
        found |= _speedups(here, features, rows)
    return found


def _gain(rows: int) -> str:
    return f"batched_speedup_{rows}"


def _over_pytorch(rows: int) -> str:
    return f"batched_speedup_{rows}_over_pytorch"


def _speedups(here, features, rows: int) -> dict[str, float | NotMeasured]:
    works = {"together": _together(rows), "alone": _alone(rows)}
    steps = {name: paired.sized_step(here, features, work) for name, work in works.items()}
    ways = {name: paired.Way(step, features) for name, step in steps.items()}
    wanted, theirs = {_gain(rows): ("alone", "together")}, {}
    if importlib.util.find_spec("torch") is not None:
        from peers.torch_model import contender

        config, batch = steps["alone"].config, steps["alone"].batch
        as_one = {name: array.reshape(1, rows, SEQ) for name, array in batch.items()}
        theirs["their alone"] = contender(config, batch, device="cuda")
        theirs["their together"] = contender(config, as_one, device="cuda")
        wanted["theirs"] = "their alone", "their together"
    found = paired.ratios(here, ways, wanted, rounds=3, beside=theirs)
    absent = NotMeasured("PyTorch is not installed (pip install 'xtrain[peers]')")
    gain, peer = found[_gain(rows)], found.get("theirs", absent)
    over = peer if isinstance(peer, NotMeasured) else gain / peer
    return {_gain(rows): gain, _over_pytorch(rows): over}


def _together(rows: int) -> Work:
    return Work("v2", rows, SEQ)


def _alone(rows: int) -> Work:
    return Work("v2", 1, SEQ, accumulation=rows)


def _rows_see_the_keys_of_the_next():
    attention = ops.attention

    def wrong(q, k, v, starts, offsets):
        rolled = Tensor(devices.current().xp.roll(k.data, 1, axis=0))
        return attention(q, rolled, v, starts, offsets)

    return mock.patch.object(ops, "attention", wrong)


def _documents_of_the_first_row_are_taken_for_all():
    sound = Qwen3.__call__

    @functools.wraps(sound)
    def wrong(self, input_ids, *, starts=None, **options):
        xp = devices.current().xp
        first = None if starts is None else xp.broadcast_to(starts[:1], starts.shape).copy()
        return sound(self, input_ids, starts=first, **options)

    return mock.patch.object(Qwen3, "__call__", wrong)


def _every_batch_is_averaged_by_itself():
    sound = Qwen3.loss

    def wrong(self, hidden, targets, scale):
        return sound(self, hidden, targets, scale / np.float32(targets.shape[0]))

    return mock.patch.object(Qwen3, "loss", wrong)


def _the_batch_is_taken_apart():
    return mock.patch.dict(globals(), _together=_alone)


LOGITS = "batched_logits_max_abs"
GATE = Gate(
    "T10",
    "Batched forward",
    measures=(numbers, speed),
    defects=(
        Defect("next row", LOGITS, numbers, _rows_see_the_keys_of_the_next),
        Defect("first documents", LOGITS, numbers, _documents_of_the_first_row_are_taken_for_all),
        Defect("own average", "batched_grads_rel", numbers, _every_batch_is_averaged_by_itself),
        Defect("taken apart", _over_pytorch(16), speed, _the_batch_is_taken_apart),
    ),
    composes=("run/v2", "model/v2", "phase/t10"),
)
