"""Write a trained model as a Hugging Face directory, read it back and compare every bit."""

from pathlib import Path

import numpy as np

from xtrain.data.hf_tokenizer import write_hf_tokenizer
from xtrain.data.tokenizer import END_OF_TEXT_ID, VOCAB_SIZE
from xtrain.engine import device
from xtrain.engine.params import FlatBuffers
from xtrain.errors import UsageError
from xtrain.models.hf import export, named_tensors
from xtrain.models.hf_import import load_hf, read_config
from xtrain.models.qwen3 import Qwen3


def export_model(model: Qwen3, buffers: FlatBuffers, directory: Path) -> dict[str, str]:
    """Export a model of the GPT-2 vocabulary; returns {file name: sha256}.

    Raises UsageError for another vocabulary (its tokenizer is not known here) and as
    `xtrain.models.hf.export` does; RuntimeError if what was written does not read back the same.
    """
    if model.config.vocab_size != VOCAB_SIZE:
        raise UsageError(
            f"model.vocab_size={model.config.vocab_size}: the tokenizer that is exported with a "
            f"model has {VOCAB_SIZE} tokens"
        )
    hashes = export(
        model,
        buffers,
        directory,
        tokenizer_writer=write_hf_tokenizer,
        eos_token_id=END_OF_TEXT_ID,
    )
    differing = differing_tensors(buffers, directory)
    if read_config(directory) != model.config or differing:
        raise RuntimeError(f"{directory} does not read back the same: {differing or 'config.json'}")
    return hashes


def differing_tensors(buffers: FlatBuffers, directory: Path) -> list[str]:
    """Names of the tensors whose bits in a Hugging Face directory are not those of the model."""
    host = device.current().host
    on_cpu = device.Device()
    again = Qwen3(read_config(directory))
    read = FlatBuffers(again.named_parameters(), on_cpu)
    load_hf(directory, read, on_cpu)
    ours = named_tensors(buffers, buffers.master)
    theirs = named_tensors(read, read.master)
    return sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours
        or name not in theirs
        or np.asarray(host(ours[name])).tobytes() != theirs[name].tobytes()
    )
