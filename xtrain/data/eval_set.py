"""Named evaluation sets: a token file with a sha256 and a manifest, made once from a recipe.

    cache_dir/<name>-<recipe>/tokens.bin      an end-of-text id, then documents with one behind each
    cache_dir/<name>-<recipe>/manifest.json   name, source, tokenizer, tokens, bytes, sha256

Every token but the first is predicted, so the first word of the first document is, too. A set is
what its tokens are: results are comparable when the sha256 of their sets is the same, whatever
they are called. One made with another tokenizer is another set.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from xtrain.data.shards import Shard, ShardWriter, open_shard
from xtrain.data.sources import Source, open_source
from xtrain.data.split import choose, hold_out
from xtrain.data.tokenizers.encoded import Encoded, UnreadableText
from xtrain.data.tokenizers.gpt2 import Tokenizer, load_gpt2
from xtrain.disk import sync
from xtrain.errors import UsageError, is_of_the_disk, write_error
from xtrain.typed_json import parse, read_bounded

# Raised when the same recipe gives other tokens.
_RECIPE = 1
# Characters of text kept for each token of a tail that is wanted: no English prose needs so many.
_TAIL_CHARS_A_TOKEN = 16


@dataclass(frozen=True)
class EvalSetConfig:
    """How a set is made, and which set an earlier result must be of to be compared.

    name                what results call it
    source              as data.source: sotu, tinystories, fineweb_edu, text
    path                text: FILE_OR_DIR; hub sources: local parquet files instead of the hub
    text_key            key (.jsonl) or column (.parquet) that holds the text
    revision            hub sources: branch, tag or commit
    file                hub sources: only the parquet file with this number, from 0. None: all
    order_seed          as data.order_seed
    heldout_fraction    only the documents that training with this fraction holds out. None: all
    tail                the last tokens of the text instead of the first
    tokens              predicted tokens, or as many as there are
    sha256              of the token file's payload with the GPT-2 tokenizer; another one is an
                        error. None: not fixed
    against             an earlier eval.json, or the run directory that holds it, to compare with
    """

    name: str = "sotu_v1"
    source: str = "sotu"
    path: str | None = None
    text_key: str = "text"
    revision: str = "main"
    file: int | None = None
    order_seed: int | None = None
    heldout_fraction: float | None = None
    tail: bool = False
    tokens: int = 131_072
    sha256: str | None = None
    against: str | None = None


@dataclass(frozen=True)
class EvalSet:
    """An open set; manifest: name, source, tokenizer, vocab_size, tokens, documents, bytes, sha256.

    tokens counts the predicted ones, bytes the UTF-8 bytes of their text.
    """

    shard: Shard
    manifest: dict

    @property
    def sha256(self) -> str:
        return self.shard.sha256


def open_eval_set(cfg: EvalSetConfig, *, cache_dir: str | Path, tokenizer=None) -> EvalSet:
    """Return the set of `cfg`, from `cache_dir` or made there.

    tokenizer: what the ids are of, by default GPT-2's. Raises UsageError for unusable text, for a
    damaged file, and for tokens that are not the set's (`sha256`).
    """
    tokenizer = tokenizer or load_gpt2()
    with _speaking_of_eval(cfg):
        source = open_source(
            cfg.source,
            path=cfg.path,
            text_key=cfg.text_key,
            first=cfg.file or 0,
            shards=None if cfg.file is None else cfg.file + 1,
            revision=cfg.revision,
        )
    elsewhere = ("name", "path", "revision", "sha256", "against")
    recipe = {k: v for k, v in asdict(cfg).items() if k not in elsewhere}
    recipe |= {"recipe": _RECIPE, "content": source.content, "tokenizer": tokenizer.fingerprint}
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    directory = Path(cache_dir) / f"{cfg.name}-{digest[:16]}"
    if not directory.exists():
        with _speaking_of_eval(cfg):
            documents = _all_documents(source, cfg, tokenizer, Path(cache_dir))
        write_eval_set(directory, documents, name=cfg.name, source=cfg.source, tokenizer=tokenizer)
    found = read_eval_set(directory)
    if cfg.sha256 and isinstance(tokenizer, Tokenizer) and cfg.sha256 != found.sha256:
        raise UsageError(
            f"eval={cfg.name}: its tokens have sha256 {found.sha256}, but {cfg.name} is "
            f"{cfg.sha256}: the text is another one; give the set another name"
        )
    return found


def write_eval_set(
    directory: Path, documents: list[Encoded], *, name: str, source: str, tokenizer
) -> None:
    """Write a set of documents of ids, which end in end-of-text; it appears by one rename.

    Another process that wrote the same directory first wins. Raises UsageError without documents.
    """
    if not documents:
        raise UsageError(f"eval={name}: no text in {source}")
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        made = {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.fingerprint}
        with ShardWriter(temporary / "tokens.bin", **made) as writer:
            writer.append(np.append(np.uint32(tokenizer.eot), documents[0].ids))
            for document in documents[1:]:
                writer.append(document.ids)
        manifest = {
            "name": name,
            "source": source,
            **made,
            "tokens": writer.tokens - 1,
            "documents": writer.documents,
            "bytes": sum(document.text_bytes for document in documents),
            "sha256": writer.sha256,
        }
        with open(temporary / "manifest.json", "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync(temporary)
        _take_name(temporary, directory)
    except OSError as error:
        if is_of_the_disk(error):
            raise write_error(directory, error, "nothing of the set is kept") from error
        raise UsageError(f"{directory}: cannot write it: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_eval_set(directory: Path) -> EvalSet:
    """Open a set. Raises UsageError when a file is damaged or the two do not belong together."""
    shard = open_shard(directory / "tokens.bin")
    path = directory / "manifest.json"
    try:
        manifest = parse(read_bounded(path))
        stated = (manifest["sha256"], manifest["tokens"], manifest["tokenizer"])
        named = (manifest["name"], manifest["bytes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: damaged; delete {directory} and start again") from error
    if stated != (shard.sha256, len(shard.tokens) - 1, shard.tokenizer) or named[1] < 1:
        raise UsageError(f"{path}: not of this token file; delete {directory} and start again")
    return EvalSet(shard, manifest)


def compare(result: dict, earlier: dict) -> tuple[float, float]:
    """(difference of the losses in nats a token, its standard error if they were independent).

    Both measured the same tokens, so the true error is smaller. Raises UsageError for results on
    different sets.
    """
    require_same_set(result, earlier)
    error = math.hypot(result["standard_error"], earlier["standard_error"])
    return result["loss"] - earlier["loss"], error


def require_same_set(one: dict, other: dict) -> None:
    """Raise UsageError unless two results are of the same set; one, other: contents of eval.json.

    The sha256 decides, not the name. Both are in the message.
    """
    ours, theirs = one["set"], other["set"]
    if ours["sha256"] != theirs["sha256"]:
        raise UsageError(
            f"results on different sets are not compared: {ours['name']} {ours['sha256']} and "
            f"{theirs['name']} {theirs['sha256']}"
        )


def _all_documents(source: Source, cfg: EvalSetConfig, tokenizer, cache_dir: Path) -> list[Encoded]:
    scratch = next(path for path in (cache_dir, *cache_dir.absolute().parents) if path.is_dir())
    try:
        return list(_documents(source.read(), cfg, tokenizer, scratch))
    except UnreadableText as error:
        raise UsageError(f"{source.find(error.text)}: {error}") from error


def _documents(
    texts: Iterator[str], cfg: EvalSetConfig, tokenizer, scratch: Path
) -> Iterator[Encoded]:
    """Ids of the set's documents, each ending in end-of-text, `cfg.tokens` in all."""
    if cfg.tail:
        texts = _last(texts, cfg.tokens * _TAIL_CHARS_A_TOKEN)
    texts, _ = choose(texts, order_seed=cfg.order_seed, scratch=scratch)
    if cfg.heldout_fraction is not None:
        texts = (text for part, text in hold_out(texts, cfg.heldout_fraction) if part)
    encoded = (tokenizer.encode_documents([text])[0] for text in texts)
    if not cfg.tail:
        yield from _first_tokens(encoded, cfg.tokens)
        return
    kept, total = deque(), 0
    for ids in encoded:
        kept.append(ids)
        total += len(ids)
        while total - len(kept[0]) >= cfg.tokens:
            total -= len(kept.popleft())
    if total > cfg.tokens:
        kept[0] = kept[0][total - cfg.tokens :]
    yield from kept


def _first_tokens(encoded: Iterator[Encoded], tokens: int) -> Iterator[Encoded]:
    for ids in encoded:
        yield ids[:tokens]
        tokens -= len(ids)
        if tokens <= 0:
            return


def _last(texts: Iterator[str], chars: int) -> Iterator[str]:
    """The last texts of a stream, at least `chars` characters of them; older ones are forgotten."""
    kept, total = deque(), 0
    for text in texts:
        kept.append(text)
        total += len(text)
        while total - len(kept[0]) >= chars:
            total -= len(kept.popleft())
    yield from kept


@contextmanager
def _speaking_of_eval(cfg: EvalSetConfig) -> Iterator[None]:
    """The sources name the keys of `data`; here the same ones are those of `eval`."""
    try:
        yield
    except UsageError as error:
        said = str(error).replace(f"data={cfg.source}:", f"eval={cfg.name}:")
        said = said.replace("data=sotu", "eval=sotu_v1").replace("data=", "eval=")
        raise UsageError(said.replace("data.", "eval.")) from error


def _take_name(temporary: Path, directory: Path) -> None:
    try:
        os.rename(temporary, directory)
    except OSError:
        if not directory.exists():  # otherwise another process was first
            raise
    sync(directory.parent)
