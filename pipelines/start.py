"""Where initial weights come from: a checkpoint, a promoted model, or a Hugging Face directory."""

from pathlib import Path

from gates.promote import model_directory
from xtrain.errors import UsageError
from xtrain.learner import Learner
from xtrain.models.config import Qwen3Config
from xtrain.models.hf_import import load_hf, read_config
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


def start_weights(origin: str, model: Qwen3Config, learner: Learner) -> None:
    """Load weights of the same shape from `init_from=`; UsageError says what does not fit.

    origin: PATH of a checkpoint or of a Hugging Face Qwen3 directory, or models:/NAME@ALIAS.
    """
    path = model_directory(origin) if origin.startswith("models:/") else Path(origin)
    if not path.is_dir():
        raise UsageError(f"init_from={origin}: no such directory")
    if (path / "manifest.json").exists():
        found = checkpoint.load_manifest(path)
        checkpoint.load_weights(found.path / checkpoint.FILES[0], learner.buffers, learner.device)
        return
    theirs = read_config(path)
    for key in SHAPE:
        if getattr(theirs, key) != getattr(model, key):
            raise UsageError(
                f"init_from={origin}: its {key} is {getattr(theirs, key)}, "
                f"model.{key} is {getattr(model, key)}"
            )
    load_hf(path, learner.buffers, learner.device)
