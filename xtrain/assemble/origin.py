"""Where weights come from: a checkpoint, a run, a promoted model, or a Hugging Face directory.

`find_origin` says where they are, their architecture and their tokenizer; `adopt` gives these to a
run; `load_origin` reads them into its learner.
"""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xtrain.assemble.learner import Learner
from xtrain.config.compose import load_saved
from xtrain.config.rules import check_run
from xtrain.config.schema import RunConfig
from xtrain.data.tokenizers.gpt2 import Tokenizer
from xtrain.data.tokenizers.imported import FILE, load_tokenizer
from xtrain.errors import UsageError
from xtrain.models.config import Qwen3Config
from xtrain.models.hf_import import load_hf, read_config, require_weights
from xtrain.track.registry import model_directory
from xtrain.train import checkpoint

SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "rms_norm_eps",
    "rope_theta",
)


@dataclass(frozen=True)
class Origin:
    """Weights on disk and what they are of.

    said: as the user wrote it. path: a checkpoint or a Hugging Face directory. saved: the config of
    the run that a checkpoint is of, None when it stands alone. model: None if nothing tells it.
    tokenizer: the directory whose tokenizer.json it goes with, None for GPT-2's.
    """

    said: str
    path: Path
    is_checkpoint: bool
    model: Qwen3Config | None
    tokenizer: str | None = None
    saved: RunConfig | None = None


def find_origin(said: str) -> Origin:
    """What PATH or models:/NAME@ALIAS stands for; no weights are read yet.

    PATH: a checkpoint, a run directory (its last complete checkpoint), or a Hugging Face directory.
    Raises UsageError when it is none of these, or not a model that this program computes.
    """
    path = model_directory(said) if said.startswith("models:/") else Path(said)
    if not os.path.isdir(path):  # no error for a name that is longer than any file's
        raise UsageError(f"init_from={said}: no such directory")
    if (path / "checkpoints").is_dir():
        found, _ = checkpoint.latest(path / "checkpoints")
        if found is None:
            raise UsageError(f"init_from={said}: the run has no complete checkpoint")
        path = found.path
    if (path / "manifest.json").exists():
        checkpoint.load_manifest(path, verify=False)
        config = path.parent.parent / "config.yaml"
        saved = load_saved(config) if config.is_file() else None
        if saved is None:
            return Origin(said, path, True, None)
        return Origin(said, path, True, saved.model, saved.data.tokenizer, saved)
    model = read_config(path)
    require_weights(path, model)
    return Origin(said, path, False, model, _own_tokenizer(path, model))


def adopt(run: RunConfig, origin: Origin, typed: Sequence[str] = ()) -> RunConfig:
    """The run with the architecture and the tokenizer of the weights that it starts from.

    typed: the overrides as the user wrote them: a model key among them must agree. Raises
    UsageError naming the key that does not.
    """
    if origin.model is None:
        return run
    model, features = origin.model, run.features
    for key in _typed_model_keys(typed):
        wanted, theirs = getattr(run.model, key), getattr(model, key)
        if key in SHAPE and theirs != wanted:
            raise UsageError(
                f"init_from={origin.said}: its {key} is {theirs}, model.{key} is {wanted}; leave "
                "the keys of model out to take its own"
            )
        model = dataclasses.replace(model, **{key: wanted})
    if origin.saved is not None:
        features = dataclasses.replace(features, qk_norm=origin.saved.features.qk_norm)
    elif not features.qk_norm:
        raise UsageError(
            f"init_from={origin.said}: a Hugging Face Qwen3 has normed queries and keys; "
            "features.qk_norm=false does not"
        )
    data = dataclasses.replace(run.data, tokenizer=origin.tokenizer)
    adopted = dataclasses.replace(run, model=model, features=features, data=data)
    check_run(adopted)
    return adopted


def start_from(run: RunConfig, typed: Sequence[str]) -> tuple[RunConfig, Origin | None]:
    """A run that trains, with the origin of its weights, if any, and that one's architecture.

    A checkpoint must be of the run's own shape: continuing another run's model under this name
    would be a mistake. A Hugging Face directory brings its shape with it.
    """
    if run.init_from is None:
        return run, None
    origin = find_origin(run.init_from)
    if origin.is_checkpoint:
        if origin.model is not None:
            _require_shape(origin, run.model)
        return run, origin
    return adopt(run, origin, typed), origin


def load_origin(origin: Origin, learner: Learner) -> None:
    """Put the weights into a learner of their shape; UsageError says what does not fit."""
    if origin.is_checkpoint:
        found = checkpoint.load_manifest(origin.path)
        checkpoint.load_weights(found.path / checkpoint.FILES[0], learner.buffers, learner.device)
    else:
        load_hf(origin.path, learner.buffers, learner.device)


def check_vocabulary(run: RunConfig) -> None:
    """Raise UsageError when the tokenizer makes ids that the model does not have."""
    tokens = load_tokenizer(run.data.tokenizer).vocab_size
    if tokens > run.model.vocab_size:
        raise UsageError(
            f"model.vocab_size={run.model.vocab_size}: the tokenizer makes {tokens} ids; "
            f"say model.vocab_size={tokens}"
        )


def _require_shape(origin: Origin, model: Qwen3Config) -> None:
    for key in SHAPE:
        if getattr(origin.model, key) != getattr(model, key):
            raise UsageError(
                f"init_from={origin.said}: its {key} is {getattr(origin.model, key)}, "
                f"model.{key} is {getattr(model, key)}"
            )


def _own_tokenizer(path: Path, model: Qwen3Config) -> str | None:
    """The directory itself, or None when its tokenizer is GPT-2's."""
    if (path / FILE).is_file():
        tokenizer = load_tokenizer(path)
        return None if isinstance(tokenizer, Tokenizer) else str(path.absolute())
    if model.vocab_size == Tokenizer.vocab_size:
        return None
    raise UsageError(f"{path}: no {FILE}, and its {model.vocab_size} words are not GPT-2's")


def _typed_model_keys(typed: Sequence[str]) -> list[str]:
    keys = [override.lstrip("+").partition("=")[0] for override in typed]
    if "model" in keys:
        return list(SHAPE)
    return [key.removeprefix("model.") for key in keys if key.startswith("model.")]
