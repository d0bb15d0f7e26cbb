"""What the reference values in this folder are of: shapes, tokens and hyper-parameters."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xtrain.models.config import Qwen3Config
from xtrain.train.config import OptimConfig

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class GoldenModel:
    """A tiny model and the file of its reference values."""

    file: str
    seed: int
    config: Qwen3Config


@dataclass(frozen=True)
class Trajectory:
    """AdamW on one parameter vector with fixed gradients."""

    size: int = 32
    decayed: int = 16
    steps: int = 100
    lr: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    eps: tuple[float, ...] = (1e-8, 1e-3)


MODELS = (
    GoldenModel(
        "grouped_untied.npz",
        1,
        Qwen3Config(
            vocab_size=211,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=128,
        ),
    ),
    GoldenModel(
        "one_kv_head_tied.npz",
        2,
        Qwen3Config(
            vocab_size=67,
            hidden_size=20,
            intermediate_size=28,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=128,
            rope_theta=1e6,
            tie_word_embeddings=True,
        ),
    ),
)
OPTIM = OptimConfig(lr=3e-3, warmup_steps=2)
TRAJECTORY, TRAJECTORY_FILE = Trajectory(), "adamw_100_steps.npz"
# Ids that both vocabularies have; lengths from one token on.
GREEDY_PROMPTS = [
    np.random.default_rng(n).integers(0, 67, n).tolist() for n in (1, 2, 3, 5, 8, 13, 21, 34)
]


def read(file: str) -> dict[str, np.ndarray]:
    """The arrays of one file of reference values."""
    with np.load(FOLDER / file) as stored:
        return dict(stored)
