"""T5: a Qwen3 decoder memorises a text and agrees with PyTorch's to rounding.

Claim   27 of 27 tokens of a sequence are learned by heart in fp32; loss, logits and every parameter
        gradient are those of transformers' Qwen3 on stored weights, with a batch above one.
Why     A wrong head order, rotation or norm still trains, only to another model than Qwen3.
Reads   gates/golden/*.npz, made once with torch and transformers.
Needs   A CPU or one CUDA device. About 5 seconds.
"""

import dataclasses
from unittest import mock

import numpy as np

from gates.instruments import tiny_run
from gates.instruments.golden.compare import golden_values
from gates.judging.gate import Defect, Gate
from xtrain.engine import device as devices
from xtrain.engine import ops
from xtrain.train.config import OptimConfig
from xtrain.train.objectives.next_token import next_token_batch
from xtrain.train.optimizer import learning_rate

# Seven words in an order in which no word tells the next one: it takes attention to know it.
SEQUENCE = [1, 2, 3, 1, 3, 2, 4, 1, 5, 2, 6, 3, 7, 1, 7, 2, 5, 3, 6, 4, 2, 7, 5, 1, 6, 7, 4, 3]
OPTIM = OptimConfig(lr=2e-2, warmup_steps=10)
STEPS = 70
GOLDEN = ("golden_loss_rel", "golden_logits_max_abs", "golden_worst_grad_rel_l2")


def overfit(device: str) -> dict[str, float]:
    """How many of the 27 next tokens of one sequence the trained model puts first."""
    here = devices.use(device)
    tiny = tiny_run.build(here, optim=OPTIM)
    ids = np.array(SEQUENCE, np.int32)[None, None]
    batch = next_token_batch(ids)
    for step in range(STEPS):
        tiny.step.load(batch, step, learning_rate(OPTIM, step, STEPS))
        tiny.step.run()
    hidden = tiny.model(here.array(batch["input_ids"][0]))
    best = here.host(tiny.model.logits(hidden).data).argmax(-1)
    return {"overfit_tokens": float((best == batch["targets"][0]).sum())}


def against_pytorch(device: str) -> dict[str, float]:
    values = golden_values(device)
    return {name: values[name] for name in GOLDEN}


def _attention_does_nothing():
    return mock.patch.object(ops, "attention", lambda q, k, v, *_: ops.scale(q, factor=0.0))


def _head_reads_kv_head_by_remainder():
    """Query head h reads key-value head h % Hk instead of h // (H // Hk)."""
    attention = ops.attention

    def wrong(q, k, v, starts, offsets):
        H, Hk = q.shape[1], k.shape[1]
        y = attention(_swap(q, H // Hk, Hk), k, v, starts, offsets)
        return _swap(y, Hk, H // Hk)

    return mock.patch.object(ops, "attention", wrong)


def _swap(x, outer: int, inner: int):
    """Reorder heads (outer, inner) to (inner, outer)."""
    B, H, T, Dh = x.shape
    x = ops.reshape(x, shape=(B, outer, inner, T * Dh))
    return ops.reshape(ops.transpose(x, axes=(0, 2, 1, 3)), shape=(B, H, T, Dh))


def _queries_are_turned_one_position_too_far():
    rope = ops.qk_norm_rope

    def wrong(qkv, q_weight, k_weight, positions, **attrs):
        q, _, _ = rope(qkv, q_weight, k_weight, positions + np.int32(1), **attrs)
        _, k, v = rope(qkv, q_weight, k_weight, positions, **attrs)
        return q, k, v

    return mock.patch.object(ops, "qk_norm_rope", wrong)


def _residual_gradient_is_dropped():
    """The norm passes its gradient on, but not that of the sum it normalised."""
    op, choose = ops.add_rms_norm, ops.add_rms_norm.implementation

    def chosen_wrongly(arrays):
        chosen = choose(arrays)

        def backward(xp, dys, saved, **attrs):
            return chosen.backward(xp, (dys[0], xp.zeros_like(dys[1])), saved, **attrs)

        return dataclasses.replace(chosen, backward=backward)

    return mock.patch.object(op, "implementation", chosen_wrongly)


def _padding_words_get_probability():
    loss = ops.linear_cross_entropy

    def wrong(x, weight, targets, scale, *, vocab_size, dweight_into=None):
        rows = weight.shape[0]
        return loss(x, weight, targets, scale, vocab_size=rows, dweight_into=dweight_into)

    return mock.patch.object(ops, "linear_cross_entropy", wrong)


GATE = Gate(
    "T5",
    "Tiny decoder",
    measures=(overfit, against_pytorch),
    defects=(
        Defect("no attention", "overfit_tokens", overfit, _attention_does_nothing),
        Defect(
            "padding counts", "golden_loss_rel", against_pytorch, _padding_words_get_probability
        ),
        Defect(
            "head order",
            "golden_logits_max_abs",
            against_pytorch,
            _head_reads_kv_head_by_remainder,
        ),
        Defect(
            "rope off by one",
            "golden_logits_max_abs",
            against_pytorch,
            _queries_are_turned_one_position_too_far,
        ),
        Defect(
            "dropped residual gradient",
            "golden_worst_grad_rel_l2",
            against_pytorch,
            _residual_gradient_is_dropped,
        ),
    ),
)
