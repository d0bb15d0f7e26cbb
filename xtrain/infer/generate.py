"""Continue prompts: prefill them once, then one token at a time against the key-value cache.

Prompts of different lengths share a batch, padded on the right: a real token never sees the padding
behind it, and what the padding left in the cache is overwritten token by token. Each row is the
same as if it were generated alone. No tape is kept, and memory does not grow with the tokens.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from xtrain.engine import device
from xtrain.engine.tensor import Tensor, no_tape
from xtrain.errors import UsageError
from xtrain.infer.cache import KVCache
from xtrain.infer.sample import Sampling, sample
from xtrain.models.qwen3 import Qwen3

PREFILL_TOKENS = 512  # of a row at once: bounds the scores of a long prompt, (B, H, 512, S)


def generate(
    model: Qwen3,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_id: int | None = None,
    streams: Sequence[int] | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, at most `max_new_tokens`, greedy by default.

    A row ends after `stop_id`, which is its last token then, or where the model's positions end.
    streams: the noise of each row (default: its number), so that `streams=[3]` repeats row 3 alone.
    Raises UsageError for an empty prompt, an id outside the vocabulary, a prompt longer than the
    model's positions, and options out of range.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    rows: list[list[int]] = [[] for _ in prompts]
    if not prompts:
        return rows
    budgets = _budgets(model, prompts, max_new_tokens)
    open_rows = {b for b, budget in enumerate(budgets) if budget > 0}
    streams = range(len(prompts)) if streams is None else streams
    for tokens in decode(model, prompts, max(budgets), sampling, streams):
        for b in list(open_rows):
            rows[b].append(int(tokens[b]))
            if rows[b][-1] == stop_id or len(rows[b]) == budgets[b]:
                open_rows.remove(b)
        if not open_rows:
            break
    return rows


def stream(
    model: Qwen3,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_id: int | None = None,
) -> Iterator[int]:
    """The tokens of `generate(model, [prompt], ...)[0]`, each as soon as it is known."""
    sampling = Sampling(temperature, top_k, top_p, seed)
    (budget,) = _budgets(model, [prompt], max_new_tokens)
    return _until(stop_id, decode(model, [prompt], budget, sampling, [0]))


def _until(stop_id: int | None, steps: Iterator[np.ndarray]) -> Iterator[int]:
    for tokens in steps:
        yield int(tokens[0])
        if tokens[0] == stop_id:
            return


def decode(
    model: Qwen3, prompts: Sequence[Sequence[int]], steps: int, sampling: Sampling, streams
) -> Iterator[np.ndarray]:
    """Host arrays (B,) int32, one a step: the next token of every prompt, finished or not."""
    if steps < 1:
        return
    here = device.current()
    streams = here.array(np.asarray(streams, np.uint32))
    longest = max(len(prompt) for prompt in prompts)
    # The last token is returned and never fed back, so it needs no place.
    cache = KVCache(
        model.config,
        len(prompts),
        longest + steps - 1,
        dtype=model.embed_tokens.weight.data.dtype,
    )
    logits = prefill(model, prompts, cache)
    for step in range(steps):
        tokens = sample(logits, sampling, step=step, streams=streams)
        yield here.host(tokens)
        if step + 1 < steps:
            with no_tape():
                logits = model.logits(model(tokens[:, None], cache=cache)).data[:, 0]


def prefill(
    model: Qwen3,
    prompts: Sequence[Sequence[int]],
    cache: KVCache,
    *,
    chunk_tokens: int = PREFILL_TOKENS,
):
    """Fill an empty cache with the prompts; returns logits (B, V) behind the last token of each."""
    here = device.current()
    lengths = [len(prompt) for prompt in prompts]
    padded = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    ids = here.array(padded)
    last = [None] * len(prompts)
    with no_tape():
        for start in range(0, padded.shape[1], chunk_tokens):
            hidden = model(ids[:, start : start + chunk_tokens], cache=cache).data
            for b, length in enumerate(lengths):
                if start < length <= start + chunk_tokens:
                    last[b] = hidden[b, length - 1 - start].copy()
        cache.keep(lengths)
        return model.logits(Tensor(here.xp.stack(last)[:, None])).data[:, 0]


def _budgets(model: Qwen3, prompts, max_new_tokens: int) -> list[int]:
    """How many tokens each row may get; the last one needs no position, as it is never fed."""
    if max_new_tokens < 0:
        raise UsageError(f"max_new_tokens={max_new_tokens}: a number of tokens, 0 or more")
    vocab_size = model.config.vocab_size
    positions = model.config.max_position_embeddings
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UsageError(
                f"prompt {i} is empty: give at least one token, e.g. the end-of-text id"
            )
        if len(prompt) > positions:
            raise UsageError(
                f"prompt {i} has {len(prompt)} tokens, the model has {positions} positions "
                "(max_position_embeddings)"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise UsageError(
                f"prompt {i} has ids from {min(prompt)} to {max(prompt)}, the vocabulary has "
                f"{vocab_size} words"
            )
    return [min(max_new_tokens, positions - len(prompt) + 1) for prompt in prompts]
