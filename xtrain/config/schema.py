"""The types of the whole YAML tree: every key of a run, once, with its meaning.

Values only. Which combinations make sense is in `rules.py`; None in Features is explained there.
"""

from dataclasses import dataclass, field

from xtrain.config.check import Check
from xtrain.data.dataset import DataConfig
from xtrain.data.eval_set import EvalSetConfig
from xtrain.infer.config import DecodeConfig
from xtrain.models.config import Qwen3Config
from xtrain.train.config import OptimConfig, TrainConfig


@dataclass(frozen=True)
class Features:
    """What a phase switches, so that every A/B is one override. None: the device's best."""

    gemm: str | None = None  # tiled | library: whose matrix product
    optimizer: str | None = None  # host | device: where AdamW and the global norm run
    op_sync: bool | None = None  # whether the host waits for every op
    batched: bool | None = None  # whether the sequences of a micro-batch go through together
    pool: bool | None = None  # whether device memory comes from one pool
    capture: bool | None = None  # whether a step is replayed as one CUDA graph
    precision: str | None = None  # fp32 | bf16: of activations and products; masters are fp32
    remat: str | None = None  # none | mlp | block: what backward computes again
    attention: str | None = None  # composed | flash
    qk_norm: bool = True  # whether each query and key head is normalised


@dataclass(frozen=True)
class PhaseConfig:
    """What a phase claims and the bars that it is held to; see `conf/phase/`."""

    name: str  # the file's name
    title: str  # a few words
    claim: str  # one sentence that the checks make true
    objective: str = "next_token"  # next_token | sft | dpo | grpo
    device_classes: list[str] = field(default_factory=lambda: ["cpu", "cuda"])  # where it can run
    checks: list[Check] = field(default_factory=list)


@dataclass(frozen=True)
class KnownData:
    """Data for which bars were found, by what they are; `xtrain dry_run=true` shows a run's own.

    fingerprint: of the preparation: the files' content (of a hub its repository and revision), the
    slice, the order, the held-out share and the tokenizer. The sha256 are of the shards.
    """

    name: str  # what the checks of this file call them
    source: str
    fingerprint: str
    train_sha256: str = ""  # "" where the text has not been prepared yet
    heldout_sha256: str = ""


@dataclass(frozen=True)
class GateConfig:
    """What a run must show to be promoted; see `conf/run/`."""

    title: str = ""  # a few words
    claim: str = ""  # one sentence that the checks make true
    requires: list[str] = field(default_factory=list)  # phases that must be PASS, e.g. T6
    data: list[KnownData] = field(default_factory=list)  # what a check's `data` refers to
    checks: list[Check] = field(default_factory=list)


@dataclass(frozen=True)
class RunConfig:
    """One run, complete. The top-level keys of the YAML tree are exactly these names."""

    name: str  # the run file's name: output folder, gate and registered model
    model: Qwen3Config
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    features: Features
    phase: PhaseConfig
    gate: GateConfig
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    eval: EvalSetConfig = field(default_factory=EvalSetConfig)
    prompt: str | None = None  # phase=decode: the text to continue; null asks for one, line by line
    seed: int = 0  # of the initial weights, the order of the data and dropout
    device: str = "auto"  # auto | cpu | cuda
    out: str = "outputs"  # root of everything that is written
    resume: str = "auto"  # auto | none | a run directory or checkpoint
    # A checkpoint, a run, models:/NAME@ALIAS, or a Hugging Face directory, which brings its shape.
    init_from: str | None = None
    launch: str = "single"  # single: one process on one device
    promote: bool = True  # whether a PASS moves the `promoted` alias
    dry_run: bool = False  # compose, count, estimate, stop
    parent: str | None = None  # the run that this one is compared with
    axes: list[str] = field(default_factory=list)  # model, data, precision, infra: may differ
