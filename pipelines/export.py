"""Write a trained model as a Hugging Face directory, read it back and compare every bit."""

import shutil
from functools import partial
from pathlib import Path

from xtrain.data.tokenizers.hf_files import write_hf_tokenizer
from xtrain.data.tokenizers.imported import load_tokenizer
from xtrain.engine.params import FlatBuffers
from xtrain.errors import UsageError
from xtrain.models.hf import export
from xtrain.models.hf_import import differing_tensors, read_config
from xtrain.models.qwen3 import Qwen3

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def export_model(
    model: Qwen3, buffers: FlatBuffers, directory: Path, tokenizer: str | Path | None = None
) -> dict[str, str]:
    """Export a model with its tokenizer; returns {file name: sha256}.

    tokenizer: the Hugging Face directory that it is of, whose tokenizer files are copied; None for
    GPT-2's. Raises UsageError when the model has fewer words than the tokenizer and as
    `xtrain.models.hf.export` does; RuntimeError if what was written does not read back the same.
    """
    words = load_tokenizer(tokenizer)
    if words.vocab_size > model.config.vocab_size:
        raise UsageError(
            f"model.vocab_size={model.config.vocab_size}: the tokenizer that is exported with a "
            f"model has {words.vocab_size} tokens"
        )
    write = write_hf_tokenizer if tokenizer is None else partial(copy_tokenizer, Path(tokenizer))
    hashes = export(model, buffers, directory, tokenizer_writer=write, eos_token_id=words.eot)
    differing = differing_tensors(buffers, directory)
    if read_config(directory) != model.config or differing:
        raise RuntimeError(f"{directory} does not read back the same: {differing or 'config.json'}")
    return hashes


def copy_tokenizer(origin: Path, directory: Path) -> None:
    """Copy what Hugging Face libraries read of a tokenizer, as far as it is there."""
    for name in TOKENIZER_FILES:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, directory / name)
