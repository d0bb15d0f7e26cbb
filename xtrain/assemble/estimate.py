"""What a run will cost, from its configuration alone: parameters, FLOPs, memory, hours.

    bytes = state + activations + max(loss, backward) + half the smaller of the two, if pooled

The tape keeps every op's inputs until a micro-batch's backward has ended, so the activations stand
beside whatever the loss or a block's backward takes. A pool hands blocks of the one to the other
where they fit; half is what did not in a replay of the allocations of v1 to v12. cuBLAS's 32 MiB
of workspace and the driver's own memory are in no pool and not counted.

After training the gradient and the moments go before a model is exported, and the rest before it is
measured again from its checkpoint; files are written and read in pieces. `run_memory_bytes` has
every stage, on a CPU with what the process holds besides arrays; the largest is what a run needs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from xtrain.config.rules import check_features, resolve_features
from xtrain.config.schema import Features, RunConfig
from xtrain.engine.chunks import LEAST_QUERIES, LOSS_BYTES, LOSS_TOKENS, QUERY_BLOCKS
from xtrain.engine.params import padded_rows
from xtrain.errors import UsageError
from xtrain.models.config import Qwen3Config
from xtrain.models.counts import count_parameters, flops_per_token
from xtrain.models.tensor_file import PIECE_BYTES

# What a process holds on a CPU besides its arrays: Python, Numba's compiled kernels, MLflow, plots.
PROCESS_BYTES = 450_000_000
# Half of what one H200 does in large products, and a few CPU cores: for an estimate of the time
# where no rate was measured, FLOP a second.
ASSUMED_FLOPS = {("cuda", "bf16"): 400e12, ("cuda", "fp32"): 25e12, ("cpu", "fp32"): 50e9}


@dataclass(frozen=True)
class Memory:
    """Bytes of a training step by what they hold."""

    weights: int  # fp32 master, and the bf16 copy
    gradients: int  # fp32
    moments: int  # two, fp32
    activations: int  # what backward needs, of one micro-batch
    logits: int  # of the chunks that exist at once; their gradient takes their place
    backward: int  # of one block: what it makes again, and its widest point
    scattered: int  # in a pool's blocks that fit neither the loss nor backward

    @property
    def total(self) -> int:
        """The fullest moment: the loss and a block's backward are not held at once."""
        working = max(self.logits, self.backward) + self.scattered
        return self.state + self.activations + working

    @property
    def state(self) -> int:
        """What lives from step to step."""
        return self.weights + self.gradients + self.moments


def training_memory_bytes(run: RunConfig, device_class: str) -> Memory:
    """Bytes that a step holds on `cpu` or `cuda`. Raises UsageError as check_features does."""
    features = resolve_features(run, device_class)
    bf16 = features.precision == "bf16"
    parameters = _padded_parameters(run.model, features.qk_norm)
    sequences = run.train.batch_size if features.batched else 1
    tokens = sequences * run.train.seq_len
    logits = _logit_bytes(run.model, tokens, device_class, bf16)
    backward = tokens * _backward_bytes(run, features, device_class)
    return Memory(
        weights=parameters * (6 if bf16 else 4),
        gradients=parameters * 4,
        moments=parameters * 8,
        activations=tokens * _activation_bytes(run, features, device_class),
        logits=logits,
        backward=backward,
        scattered=min(logits, backward) // 2 if features.pool else 0,
    )


@dataclass(frozen=True)
class Stages:
    """Bytes that a whole run holds at the fullest moment of each of its stages."""

    by_name: dict[str, int]

    @property
    def fullest(self) -> str:
        """The name of the stage that holds most."""
        return max(self.by_name, key=self.by_name.__getitem__)

    @property
    def largest(self) -> int:
        """What the run needs."""
        return self.by_name[self.fullest]


def run_memory_bytes(run: RunConfig, device_class: str) -> Stages:
    """What every stage of a run holds on `cpu` or `cuda`. Raises UsageError as check_features."""
    features = resolve_features(run, device_class)
    memory = training_memory_bytes(run, device_class)
    size = 2 if features.precision == "bf16" else 4
    asked = _asked_bytes(run, device_class)
    pieces = 2 * min(PIECE_BYTES, 4 * run.model.vocab_size * run.model.hidden_size)
    held = PROCESS_BYTES if device_class == "cpu" else 0
    stages = {
        "training": memory.total,
        "evaluation": memory.state + asked,
        "samples": memory.weights + _sample_bytes(run, size),
        "export": memory.weights + pieces,
        "measuring again": memory.weights + max(asked, pieces),
    }
    return Stages({name: held + needed for name, needed in stages.items()})


def asking_memory_bytes(run: RunConfig, device_class: str) -> Stages:
    """What a trained model holds that is asked for losses (phase=eval) or texts (phase=decode)."""
    memory = training_memory_bytes(run, device_class)
    size = 2 if resolve_features(run, device_class).precision == "bf16" else 4
    held = memory.weights + (PROCESS_BYTES if device_class == "cpu" else 0)
    if run.phase.name == "eval":
        return Stages({"evaluation": held + _asked_bytes(run, device_class)})
    return Stages({"decoding": held + _cache_bytes(run.model, 1, run.decode.max_new_tokens, size)})


def what_would_fit(run: RunConfig, device_class: str, total_bytes: int) -> str:
    """Overrides that train the same tokens a step in less memory, for a run that found it full.

    Smaller micro-batches first, then recomputation, then both. total_bytes: of the device. One
    phrase, with the estimated bytes of each choice.
    """
    run = replace(run, features=resolve_features(run, device_class))
    held = PROCESS_BYTES if device_class == "cpu" else 0  # whatever is changed
    now = run_memory_bytes(run, device_class).largest
    budget = held + 0.9 * (min(total_bytes, now) - held)
    found = []
    for remat in dict.fromkeys((run.features.remat, "block")):
        for changed in _smaller(run, remat):
            needed = run_memory_bytes(changed, device_class).largest
            if needed <= budget:
                found.append(f"{_overrides(run, changed)} ({_unit(needed, 'B')})")
                break
    if found:
        return f"what would fit: {' or '.join(found)}"
    return f"{_unit(needed, 'B')} are needed even with {_overrides(run, changed)}"


def padded_vocab(config: Qwen3Config) -> int:
    """Rows of the embedding and the head in memory."""
    return padded_rows(config.vocab_size)


def describe(run: RunConfig, device_class: str | None = None, tok_s: float | None = None) -> str:
    """What a run is about to do, for a person to read before it starts.

    device_class: `cpu` or `cuda`; None: the run's, and for device=auto both. tok_s: a measured
    rate in tokens a second; without one the time rests on an assumed FLOP rate, and says so.
    """
    counts = count_parameters(run.model, qk_norm=run.features.qk_norm)
    train, model = run.train, run.model
    flops = flops_per_token(model, train.seq_len, qk_norm=run.features.qk_norm)
    tokens = train.total_steps * train.tokens_per_step
    lines = [
        f"run {run.name}, phase {run.phase.name}: {run.phase.title}",
        f"parameters  {_count(counts.core)} core + {_count(counts.embedding)} embedding"
        f" + {_count(counts.head)} head = {_count(counts.total)}"
        f" ({model.num_hidden_layers} layers of {model.hidden_size}, {model.num_attention_heads}"
        f" heads over {model.num_key_value_heads}, ffn {model.intermediate_size})",
        f"data        {run.data.name}{_slice(run)}",
        f"tokens      {_count(tokens)} = {train.total_steps:,} steps x {train.tokens_per_step:,}"
        f" (accumulation {train.accumulation} x batch {train.batch_size} x seq {train.seq_len})",
        f"compute     {_unit(flops, 'FLOP')} a token, {_unit(flops * tokens, 'FLOP')} in all",
    ]
    device_class = device_class or run.device
    for name in ["cpu", "cuda"] if device_class == "auto" else [device_class]:
        lines.append(f"on {name:<9}{_on_device(run, name, flops * tokens, tokens, tok_s)}")
    return "\n".join(lines)


def _on_device(
    run: RunConfig, device_class: str, flops: float, tokens: int, tok_s: float | None
) -> str:
    try:
        check_features(run, device_class)
    except UsageError as refusal:
        return f"no: {refusal}"
    features = resolve_features(run, device_class)
    memory, stages = training_memory_bytes(run, device_class), run_memory_bytes(run, device_class)
    if tok_s:
        time = f"{_duration(tokens / tok_s)} at {_count(tok_s)} tok/s"
    else:
        rate = ASSUMED_FLOPS[device_class, features.precision]
        time = f"about {_duration(flops / rate)} if it does {_unit(rate, 'FLOP')}/s (not measured)"
    return (
        f"{features.precision}, {_unit(stages.largest, 'B')} at most, in {stages.fullest}: "
        f"{_unit(memory.state, 'B')} state, "
        f"{_unit(memory.activations, 'B')} activations, {_unit(memory.logits, 'B')} logits, "
        f"{_unit(memory.backward, 'B')} backward; {time}"
    )


def _padded_parameters(config: Qwen3Config, qk_norm: bool) -> int:
    counts = count_parameters(config, qk_norm=qk_norm)
    matrices = 1 if config.tie_word_embeddings else 2
    return counts.core + matrices * padded_vocab(config) * config.hidden_size


def _activation_bytes(run: RunConfig, features: Features, device_class: str) -> int:
    """Bytes that one token leaves on the tape until backward has ended."""
    config, size = run.model, 2 if features.precision == "bf16" else 4
    mixer, mlp = _block_bytes(run, features, device_class)
    stream = 2 * size * config.hidden_size  # the pair that a block hands on
    kept = {"none": mixer + mlp, "mlp": mixer + stream, "block": stream}[features.remat]
    # Embedding, last sum, normed sum and its gradient; none and mlp have no first sum instead.
    ends = (4 if features.remat == "block" else 3) * size * config.hidden_size
    return config.num_hidden_layers * kept + ends


def _block_bytes(run: RunConfig, features: Features, device_class: str) -> tuple[int, int]:
    """Bytes a token of what the ops of a block make: in its attention half and in its MLP half."""
    config, size = run.model, 2 if features.precision == "bf16" else 4
    D, F, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    q, kv = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    # The CPU keeps the probabilities. A GPU makes them again, unless one block of queries is all;
    # flash attention never has them and keeps the logarithm of their sum, fp32.
    flash = features.attention == "flash"
    keeps = not flash and (device_class == "cpu" or run.train.seq_len <= LEAST_QUERIES)
    scores = heads * run.train.seq_len if keeps else 0
    both = 2 * D  # sum and normed sum; the half's result goes into the next sum and is let go
    norms = 4 * (heads + config.num_key_value_heads if features.qk_norm else 0)  # 1 / rms, fp32
    # qkv; q, k, v after norm and RoPE; attention's output. Gate, up and their product.
    mixer = both + (q + 2 * kv) + (q + 2 * kv) + q + scores
    sums = 4 * heads if flash else 0
    return size * mixer + norms + sums + 4, size * (both + 3 * F) + 4


def _backward_bytes(run: RunConfig, features: Features, device_class: str) -> int:
    """Bytes a token that backward of one block adds: recomputation, then its widest op."""
    config, size = run.model, 2 if features.precision == "bf16" else 4
    D, F, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    q, kv = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    mixer, mlp = _block_bytes(run, features, device_class)
    again = {"none": 0, "mlp": mlp, "block": mixer + mlp}[features.remat]
    queries = run.train.seq_len
    if device_class == "cuda":
        queries = min(queries, max(LEAST_QUERIES, queries // QUERY_BLOCKS))
    if features.attention == "flash":
        # dy and dq; dk and dv; two fp32 terms a query and head.
        attention = size * 2 * (q + kv) + 8 * heads
    else:
        # dy, q, dy and dq by query; dk and dv, fp32 if summed over blocks; p and dp (fp32).
        sums = 4 if queries < run.train.seq_len else size
        attention = size * 4 * q + sums * 2 * kv + (4 + size) * heads * queries
    swiglu = size * 3 * F  # dy, dgate and dup
    return again + size * D + max(attention, swiglu)


def _asked_bytes(run: RunConfig, device_class: str) -> int:
    """Bytes of a micro-batch's losses without a tape, beside the weights."""
    features = resolve_features(run, device_class)
    tokens = run.train.batch_size * run.train.seq_len
    size = 2 if features.precision == "bf16" else 4
    halves = _block_bytes(run, features, device_class)
    # The pair that a block was given and the one that it makes, and its half.
    passing = tokens * (4 * size * run.model.hidden_size + max(halves))
    return passing + _logit_bytes(run.model, tokens, device_class, False)


def _sample_bytes(run: RunConfig, size: int) -> int:
    return _cache_bytes(run.model, len(run.train.prompts), run.train.sample_tokens, size)


def _cache_bytes(config: Qwen3Config, rows: int, new_tokens: int, size: int) -> int:
    """Bytes of the cache of keys and values of texts that are continued, and of their logits."""
    positions = min(config.max_position_embeddings, 512 + new_tokens)
    kept = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    return rows * (positions * kept * size + 2 * 4 * padded_vocab(config))


def _logit_bytes(config: Qwen3Config, tokens: int, device_class: str, bf16: bool) -> int:
    """Bytes of a chunk's logits, which their gradient overwrites."""
    vocabulary, size = padded_vocab(config), 2 if bf16 else 4
    most = LOSS_TOKENS
    if device_class == "cuda":
        most = 1 << (max(LOSS_BYTES // (size * vocabulary), 1).bit_length() - 1)
    return min(tokens, most) * vocabulary * size


def _smaller(run: RunConfig, remat: str) -> Iterator[RunConfig]:
    """The run with this remat and halved micro-batches, as often as they can be halved."""
    run = replace(run, features=replace(run.features, remat=remat))
    while True:
        yield run
        train = run.train
        if train.batch_size % 2:
            return
        halved, doubled = train.batch_size // 2, 2 * train.accumulation
        run = replace(run, train=replace(train, batch_size=halved, accumulation=doubled))


def _overrides(run: RunConfig, changed: RunConfig) -> str:
    """What to type to turn one into the other."""
    values = {
        "train.batch_size": (run.train.batch_size, changed.train.batch_size),
        "train.accumulation": (run.train.accumulation, changed.train.accumulation),
        "features.remat": (run.features.remat, changed.features.remat),
    }
    typed = [f"{key}={new}" for key, (old, new) in values.items() if new != old]
    return " ".join(typed) or f"train.batch_size={run.train.batch_size}"


def _slice(run: RunConfig) -> str:
    parts = []
    if run.data.shards:
        parts.append(f"first {run.data.shards} files")
    if run.data.max_bytes:
        parts.append(f"{_unit(run.data.max_bytes, 'B')} of it")
    return f" ({', '.join(parts)})" if parts else ""


def _count(number: float) -> str:
    """41.4K, 357M, 1.07B: three digits."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def _unit(number: float, unit: str) -> str:
    """9.95 MFLOP, 41 GB: decimal prefixes."""
    for size, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.0f} {unit}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 86400:,.0f} days"
