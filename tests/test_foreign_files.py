"""Files with random damage: each is read, or refused in one line that names it; none crashes.

What is accepted, and why it is right:
  jsonl, txt   damage that leaves UTF-8, JSON and a text under the key: it is another text, and the
               cache is keyed by the files' content
  parquet      damage in bytes that no reader needs (another column, statistics, padding), or in the
               text itself where the page has no checksum: another text, as above
  shards       none: every bit stands under a sha256; with re-made hashes, any ids of the vocabulary
  checkpoints  none: every file stands under the sha256 of its manifest; the manifest itself where
               the damage leaves every value that is used (a time, white space)
  Hugging Face other numbers in the weights, finite ones; a config.json that still describes these
               very weights (eps, theta, an unused key); a tokenizer whose ids still fit
"""

import hashlib
import json
import random

import numpy as np
import pytest

from gates.instruments.golden import compare
from gates.instruments.golden.reference import MODELS
from xtrain.data.shards import ShardWriter, open_shard
from xtrain.data.sources import open_source
from xtrain.data.tokenizers.imported import ImportedTokenizer, end_ids
from xtrain.engine import device as devices
from xtrain.engine.params import FlatBuffers
from xtrain.errors import UsageError
from xtrain.models.hf import export
from xtrain.models.hf_import import load_hf, read_config, require_weights
from xtrain.models.qwen3 import Qwen3
from xtrain.train import checkpoint
from xtrain.train.config import OptimConfig
from xtrain.train.optimizer import AdamW

CONFIG = MODELS[0].config
CPU = devices.use("cpu")
STORIES = [f"Story {i}: the cat sat on mat number {i * i}. Caf\u00e9 \U0001f642" for i in range(40)]
ODD = [b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"[" * 3000, b"1e999", b"NaN", b"-1", b'"']
VALUES = [None, True, -1, 0, 1e300, 10**30, "", "x" * 5000, "../..", [], {}, [[[]]], "\u0000"]


def damaged(raw: bytes, source: random.Random) -> bytes:
    """The bytes with one to three changes."""
    out = bytearray(raw)
    for _ in range(source.randint(1, 3)):
        at = source.randrange(len(out) + 1)
        match source.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << source.randrange(8)
            case 1:
                del out[at:]
            case 2:
                del out[at : at + source.randint(1, 64)]
            case 3:
                out[at:at] = source.choice(ODD)
            case 4:
                out[at : at + 8] = source.randbytes(8)
            case _:
                end = min(len(out), at + source.randint(1, 200))
                out[at:at] = out[at:end]
    return bytes(out)


def retyped(raw: bytes, source: random.Random) -> bytes:
    """JSON with one value, at any depth, that is another."""
    tree = json.loads(raw)
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = source.choice(keys)
        if not isinstance(node[key], dict | list) or not node[key] or source.random() < 0.3:
            node[key] = source.choice(VALUES)
            return json.dumps(tree).encode()
        node = node[key]


def write_jsonl(directory):
    path = directory / "a.jsonl"
    path.write_text("".join(json.dumps({"text": s, "n": 1}) + "\n" for s in STORIES), "utf-8")
    return [path], lambda: list(open_source("text", path=str(path)).read())


def write_text(directory):
    path = directory / "a.txt"
    path.write_text("\n".join(STORIES), "utf-8")
    return [path], lambda: list(open_source("text", path=str(path)).read())


def write_parquet(directory):
    import pyarrow
    import pyarrow.parquet

    path = directory / "a.parquet"
    columns = {"text": STORIES, "n": list(range(len(STORIES)))}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=11)
    return [path], lambda: list(open_source("text", path=str(path)).read())


def write_shard(directory):
    path = directory / "a.bin"
    with ShardWriter(path, vocab_size=300, tokenizer=hashlib.sha256(b"t").hexdigest()) as writer:
        for length in range(1, 20):
            writer.append(np.arange(length) * 7)
    return [path], lambda: open_shard(path)


def write_huggingface(directory):
    model, buffers = compare.random_model(CONFIG, "cpu")
    where = directory / "out"
    export(model, buffers, where, tokenizer_writer=lambda folder: None, eos_token_id=3)

    def read():
        config = read_config(where)
        require_weights(where, config)
        end_ids(where)
        found = Qwen3(config)
        load_hf(where, FlatBuffers(found.named_parameters(), CPU), CPU)

    return sorted(where.iterdir()), read


def write_checkpoint(directory):
    _, buffers = compare.random_model(CONFIG, "cpu")
    optimizer = AdamW(buffers, OptimConfig(lr=1e-3), CPU)
    saved = checkpoint.save(directory / "checkpoints", 3, buffers, optimizer, CPU, {"n": 1})

    def read():
        found = checkpoint.load_manifest(saved.path)
        checkpoint.load_weights(found.path / checkpoint.FILES[0], buffers, CPU)
        checkpoint.latest(saved.path.parent)

    return sorted(saved.path.iterdir()), read


def write_tokenizer(directory):
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, show_progress=False)
    made.train_from_iterator(STORIES, trainer)
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(directory / "tokenizer.json"))

    def read():
        tokenizer = ImportedTokenizer(directory)
        for document in tokenizer.encode_documents(STORIES[:3], workers=1):
            assert document.text_bytes >= 0
            tokenizer.decode(document.ids)

    return [directory / "tokenizer.json"], read


KINDS = [
    write_jsonl,
    write_text,
    write_parquet,
    write_shard,
    write_huggingface,
    write_tokenizer,
    write_checkpoint,
]
SEALED = (write_shard, write_checkpoint)


def mutate(write, directory, count, seed):
    """Read `count` damaged copies; returns how many were accepted."""
    source = random.Random(f"{write.__name__} {seed}")
    files, read = write(directory)
    read()  # undamaged, it is accepted
    whole = {file: file.read_bytes() for file in files}
    accepted = 0
    for number in range(count):
        file = source.choice(files)
        typed = file.suffix == ".json" and source.random() < 0.7
        content = (retyped if typed else damaged)(whole[file], source)
        file.write_bytes(content)
        try:
            read()
            accepted += content != whole[file]
        except UsageError as error:
            said = str(error)
            assert "\n" not in said and len(said) < 1500, (number, said)
            assert str(directory) in said, (number, said)
        except BaseException as error:
            kept = directory / "crashed"
            kept.write_bytes(content)
            raise AssertionError(f"{write.__name__} {seed}, {number}: {kept}: {error!r}") from error
        finally:
            file.write_bytes(whole[file])
    return accepted


@pytest.mark.parametrize("write", KINDS)
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path, write):
    accepted = mutate(write, tmp_path, 60, seed=0)
    if write in SEALED:
        assert accepted == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("write", KINDS)
def test_many_damaged_files_are_read_or_refused_in_one_line(tmp_path, write, seed):
    accepted = mutate(write, tmp_path, 100, seed=seed + 1)
    if write in SEALED:
        assert accepted == 0
