"""Preparation: order, slices, the held-out part, the cache, several processes, a kill."""

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import pty
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pipelines.prepare import describe, prepare_data
from xtrain.data import dataset, order
from xtrain.data.dataset import DataConfig, prepare, unigram_entropy
from xtrain.data.sources import open_source
from xtrain.data.split import choose, hold_out
from xtrain.data.tokenizers.gpt2 import load_gpt2
from xtrain.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
STORIES = [f"Story {i}: the cat sat on mat number {i * i}." for i in range(40)]


def text_config(path, **values):
    return DataConfig("text", "text", path=str(path), **values)


def documents_of(shard):
    tokenizer = load_gpt2()
    bounds = shard.offsets.tolist()
    rows = [shard.tokens[a:b].tolist() for a, b in pairwise(bounds)]
    assert all(row[-1] == tokenizer.eot for row in rows)
    return [tokenizer.decode(row[:-1]) for row in rows]


def write_stories(directory):
    for i, story in enumerate(STORIES):
        (directory / f"{i:03d}.txt").write_text(story)
    return directory


def refusal(function, *args, **values):
    """The one line of the UsageError that the call raises."""
    with pytest.raises(UsageError) as caught:
        function(*args, **values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- order, slices, the held-out part ---


def test_order_is_a_function_of_the_seed_alone():
    def order(texts, seed):
        return list(choose(texts, order_seed=seed)[0])

    assert order(STORIES, 0) == order(STORIES[::-1], 0)
    assert order(STORIES, 0) != order(STORIES, 1)
    assert sorted(order(STORIES, 0)) == sorted(STORIES)


def test_a_slice_of_sotu_spans_the_centuries_in_both_parts():
    texts = list(open_source("sotu").read())
    year = {text: i / len(texts) for i, text in enumerate(texts)}  # 0 the first, 1 the last
    chosen, total = choose(texts, order_seed=0, max_bytes=3_000_000)
    chosen = list(chosen)
    assert total == 3_000_000 >= sum(len(text.encode()) for text in chosen) > 2_700_000
    for part in (chosen[9::10], [t for i, t in enumerate(chosen) if i % 10 != 9]):
        assert min(year[t] for t in part) < 0.25
        assert max(year[t] for t in part) > 0.75


def test_a_slice_is_whole_documents_and_begins_every_longer_slice():
    whole = list(choose(STORIES, order_seed=0)[0])
    for max_bytes in (50, 100, 333, 10_000):
        part = list(choose(STORIES, order_seed=0, max_bytes=max_bytes)[0])
        assert part == whole[: len(part)]
        assert sum(map(len, part)) <= max_bytes
        assert part == whole or sum(map(len, whole[: len(part) + 1])) > max_bytes


def test_order_is_that_of_the_keyed_hash_whatever_fits_into_memory(tmp_path, monkeypatch):
    texts = [f"{i} " + "\u00e9" * (i % 97) for i in range(5000)]
    key = (7).to_bytes(8, "little")
    expected = sorted(texts, key=lambda t: hashlib.blake2b(t.encode(), key=key).digest())
    for held, fan in ((1 << 26, 64), (20_000, 64), (20_000, 3), (1, 64)):
        monkeypatch.setattr(order, "RUN_BYTES", held)
        monkeypatch.setattr(order, "FAN", fan)
        found, total = order.by_hash(iter(texts), 7, tmp_path)
        assert list(found) == expected
        assert total == sum(len(text.encode()) for text in texts)
        assert not list(tmp_path.iterdir())


def test_order_holds_no_more_than_it_says(tmp_path):
    script = (
        "import resource, sys, pathlib\n"
        "from xtrain.data.order import HELD_BYTES, by_hash\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak()\n"
        "texts = (f'{i}' + 'text ' * 1000 for i in range(80_000))\n"
        "ordered, total = by_hash(texts, 0, pathlib.Path(sys.argv[1]))\n"
        "assert sum(map(len, ordered)) == total > 4e8\n"
        "print((peak() - before) / HELD_BYTES)\n"
    )
    command = [sys.executable, "-c", script, tmp_path]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert float(told.stdout) < 1


def test_of_a_document_larger_than_the_slice_the_head_is_taken():
    assert list(choose(["\u00e9" * 10, "b"], max_bytes=5)[0]) == ["\u00e9\u00e9"]


def test_every_nth_document_is_held_out(tmp_path):
    config = text_config(write_stories(tmp_path), heldout_fraction=0.1)
    prepared = prepare(config, cache_dir=tmp_path / "cache")
    assert documents_of(prepared.heldout) == STORIES[9::10]
    assert documents_of(prepared.train) == [s for i, s in enumerate(STORIES) if i % 10 != 9]


def test_holding_out_stops_at_the_limit_and_the_rest_is_trained_on():
    rows = [np.full(4, i) for i in range(40)]
    parts = list(hold_out(iter(rows), 0.1, limit=7))
    assert [int(ids[0]) for part, ids in parts if part] == [9, 19]
    assert len(parts) == 40


def test_more_files_keep_the_held_out_set_of_fewer(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for i in range(3):
        rows = {"text": [f"shard {i} page {j}" for j in range(20)]}
        parquet.write_table(pyarrow.table(rows), tmp_path / f"00{i}.parquet")
    prints = set()
    for shards in (1, 2, 3):
        config = DataConfig(
            *("pages", "fineweb_edu", str(tmp_path)),
            shards=shards,
            heldout_fraction=0.1,
            heldout_tokens=8,
        )
        prints.add(prepare(config, cache_dir=tmp_path / "cache").heldout.fingerprint)
    assert len(prints) == 1


@pytest.mark.parametrize("lengths", [[100], [60, 40], [50, 48, 2], [97, 1, 1, 1]])
def test_of_few_documents_the_tail_is_held_out(lengths):
    stream = np.arange(sum(lengths))
    rows = np.split(stream, np.cumsum(lengths)[:-1])
    parts = list(hold_out(iter(rows), 0.05))
    assert np.concatenate([ids for part, ids in parts if not part]).tolist() == list(range(95))
    assert np.concatenate([ids for part, ids in parts if part]).tolist() == list(range(95, 100))


def test_empty_documents_are_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}) for t in ["", *STORIES, ""]))
    prepared = prepare(text_config(path), cache_dir=tmp_path / "cache")
    assert prepared.train.documents + prepared.heldout.documents == 40


# --- the prepared data ---


@pytest.mark.parametrize(
    "source, values, message",
    [
        ("books", {}, "data.source=books: use one of sotu, tinystories, fineweb_edu, text"),
        ("text", {}, "data=text needs data.path=FILE_OR_DIR"),
        ("text", {"path": ""}, "data=text needs data.path=FILE_OR_DIR"),
        ("sotu", {"path": "x"}, "data.path=x: sotu has its own; use data=text"),
        ("sotu", {"max_bytes": 0}, "data.max_bytes=0: use a positive number"),
        ("sotu", {"order_seed": -1}, "data.order_seed=-1: use 0 or more"),
        ("sotu", {"shards": 2}, "data.shards=2: only tinystories and fineweb_edu have shards"),
        ("fineweb_edu", {"shards": 0}, "data.shards=0: use a positive number"),
        ("sotu", {"heldout_fraction": 0.0}, "data.heldout_fraction=0.0: use at least 0.0001"),
        ("sotu", {"heldout_fraction": 0.6}, "data.heldout_fraction=0.6"),
        ("sotu", {"heldout_fraction": math.nan}, "data.heldout_fraction=nan"),
        ("sotu", {"heldout_tokens": 1}, "data.heldout_tokens=1: use 2 or more"),
        ("sotu", {"workers": -1}, "data.workers=-1"),
    ],
)
def test_a_wrong_value_names_the_key_and_the_right_ones(tmp_path, source, values, message):
    config = DataConfig("x", source, **values)
    assert message in refusal(prepare, config, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    write_stories(tmp_path)
    cache = tmp_path / "000.txt" / "cache"
    message = refusal(prepare, text_config(tmp_path), cache_dir=cache)
    assert message.startswith(f"{cache}: cannot write the data cache")


def test_the_manifest_counts_tokens_documents_and_bytes(tmp_path):
    prepared = prepare(text_config(write_stories(tmp_path)), cache_dir=tmp_path / "cache")
    for part, shard in (("train", prepared.train), ("heldout", prepared.heldout)):
        counts = prepared.manifest[part]
        assert counts["tokens"] == len(shard.tokens)
        assert counts["documents"] == shard.documents
        assert counts["bytes"] == sum(len(text.encode()) for text in documents_of(shard))
        assert counts["sha256"] == shard.sha256


def test_preparing_again_reads_the_cache(tmp_path):
    config = text_config(write_stories(tmp_path))
    calls = []
    first = prepare(config, cache_dir=tmp_path / "cache", progress=lambda *a: calls.append(a))
    assert calls == [(sum(map(len, STORIES)), None)]
    again = prepare(config, cache_dir=tmp_path / "cache", progress=lambda *a: calls.append(a))
    assert len(calls) == 1
    assert again.fingerprint == first.fingerprint
    assert again.manifest == first.manifest


def test_progress_ends_at_the_total(tmp_path):
    config = text_config(write_stories(tmp_path), order_seed=0)
    calls = []
    prepare(config, cache_dir=tmp_path / "cache", progress=lambda *a: calls.append(a))
    assert calls[-1] == (sum(map(len, STORIES)),) * 2


@pytest.mark.parametrize(
    "change",
    [{"max_bytes": 900}, {"order_seed": 1}, {"heldout_fraction": 0.2}, {"heldout_tokens": 9}],
)
def test_what_changes_the_data_changes_the_fingerprint(tmp_path, change):
    config = text_config(write_stories(tmp_path))
    other = dataclasses.replace(config, **change)
    prints = [prepare(c, cache_dir=tmp_path / "cache").fingerprint for c in (config, other)]
    assert prints[0] != prints[1]


def test_a_changed_file_changes_the_fingerprint(tmp_path):
    config = text_config(write_stories(tmp_path))
    before = prepare(config, cache_dir=tmp_path / "cache").fingerprint
    (tmp_path / "007.txt").write_text("Another story of the same place.")
    assert prepare(config, cache_dir=tmp_path / "cache").fingerprint != before


def test_what_does_not_change_the_data_shares_the_cache(tmp_path):
    config = text_config(write_stories(tmp_path))
    other = dataclasses.replace(config, name="mine", workers=1, respect_documents=True)
    prints = {prepare(c, cache_dir=tmp_path / "cache").fingerprint for c in (config, other)}
    assert len(prints) == 1


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_and_groups_do_not_change_the_bytes(tmp_path, monkeypatch, workers):
    config = text_config(write_stories(tmp_path), workers=workers)
    whole = prepare(config, cache_dir=tmp_path / "a")
    monkeypatch.setattr(dataset, "_GROUP_CHARS", 100)
    grouped = prepare(config, cache_dir=tmp_path / "b")
    assert grouped.manifest == whole.manifest
    assert grouped.train_path.read_bytes() == whole.train_path.read_bytes()


def test_a_damaged_cache_is_named(tmp_path):
    config = text_config(write_stories(tmp_path))
    path = prepare(config, cache_dir=tmp_path / "cache").train_path
    path.write_bytes(path.read_bytes()[:-8])
    message = refusal(prepare, config, cache_dir=tmp_path / "cache")
    assert message.startswith(f"{path}: token shard truncated")


def test_a_damaged_manifest_is_named(tmp_path):
    config = text_config(write_stories(tmp_path))
    directory = prepare(config, cache_dir=tmp_path / "cache").train_path.parent
    (directory / "manifest.json").write_text('{"train"')
    assert "manifest.json: damaged" in refusal(prepare, config, cache_dir=tmp_path / "cache")


def test_unigram_entropy_is_that_of_the_counts(tmp_path):
    prepared = prepare(text_config(write_stories(tmp_path)), cache_dir=tmp_path / "cache")
    train, heldout = prepared.train.tokens.tolist(), prepared.heldout.tokens.tolist()
    losses = [-math.log((train.count(t) + 1) / (len(train) + 50257)) for t in heldout]
    assert unigram_entropy(prepared) == pytest.approx(sum(losses) / len(losses), rel=1e-12)


# --- several processes, and one that dies ---

PREPARE = """
import sys
from xtrain.data import dataset, order
dataset._GROUP_CHARS = 100
calls = []
config = dataset.DataConfig("text", "text", path=sys.argv[1])
prepared = dataset.prepare(config, cache_dir=sys.argv[2], progress=lambda *a: calls.append(a))
print(prepared.fingerprint, prepared.train.sha256, len(calls))
"""

DIE = """
import os, signal, sys
from xtrain.data import dataset, order
dataset._GROUP_CHARS = 100
def die(done, total):
    if done > 500:
        os.kill(os.getpid(), signal.SIGKILL)
config = dataset.DataConfig("text", "text", path=sys.argv[1])
dataset.prepare(config, cache_dir=sys.argv[2], progress=die)
"""


def start_python(script, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def run_python(script, *arguments, **environment):
    process = start_python(script, *arguments, **environment)
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def test_two_processes_prepare_the_same_data_once(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_stories(corpus)
    processes = [start_python(PREPARE, corpus, tmp_path / "cache") for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    rows = [stdout.split() for stdout, _ in outputs]
    assert rows[0][:2] == rows[1][:2]
    assert sorted(int(row[2]) > 0 for row in rows) == [False, True]
    visible = [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    assert visible == [rows[0][0]]


def test_the_lock_is_held_while_data_is_prepared(tmp_path):
    held = []

    def try_lock(done, total):
        (path,) = (tmp_path / "cache").glob(".*.lock")
        with open(path) as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(path)

    prepare(text_config(write_stories(tmp_path)), cache_dir=tmp_path / "cache", progress=try_lock)
    assert len(held) == 1


def test_a_kill_while_preparing_leaves_nothing_half_written_in_place(tmp_path):
    corpus, cache = tmp_path / "corpus", tmp_path / "cache"
    corpus.mkdir()
    config = text_config(write_stories(corpus))
    assert run_python(DIE, corpus, cache).returncode == -signal.SIGKILL
    left = [p.name for p in cache.iterdir()]
    assert len([name for name in left if name.endswith(".tmp")]) == 1
    assert all(name.startswith(".") for name in left)
    prepared = prepare(config, cache_dir=cache)
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [prepared.fingerprint]
    assert prepared.manifest == prepare(config, cache_dir=tmp_path / "fresh").manifest


def test_an_interrupted_preparation_cleans_up(tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    config = text_config(write_stories(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        prepare(config, cache_dir=tmp_path / "outputs" / "cache", progress=interrupt)
    assert not (tmp_path / "outputs").exists()


# --- what the command shows ---


def test_the_command_says_what_came_out(tmp_path, capsys):
    prepared = prepare_data(text_config(write_stories(tmp_path)), tmp_path / "cache")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == describe(prepared) + "\n"
    assert "2 documents held out" in describe(prepared)


def test_on_a_terminal_there_is_a_bar(tmp_path):
    script = (
        "import sys; from xtrain.data.dataset import DataConfig\n"
        "from pipelines.prepare import prepare_data\n"
        "prepare_data(DataConfig('mine', 'text', sys.argv[1]), sys.argv[2])"
    )
    terminal, end = pty.openpty()
    write_stories(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path, tmp_path / "cache"],
        stderr=end,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"},
    )
    os.close(end)
    shown = read_terminal(terminal)
    assert process.wait() == 0, shown
    assert "tokenising mine" in shown
    assert "data mine: " in shown


def read_terminal(handle):
    shown = b""
    try:
        while chunk := os.read(handle, 4096):
            shown += chunk
    except OSError:
        pass  # how Linux says that the other end is closed
    os.close(handle)
    return shown.decode()


def test_quiet_says_nothing(tmp_path, capsys):
    prepare_data(text_config(write_stories(tmp_path)), tmp_path / "cache", quiet=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["sotu", "tinystories", "fineweb_edu", "text"])
def test_a_data_file_gives_every_key_and_values_that_are_right(name):
    omegaconf = pytest.importorskip("omegaconf")
    values = omegaconf.OmegaConf.load(ROOT / "conf" / "data" / f"{name}.yaml")
    assert list(values) == [field.name for field in dataclasses.fields(DataConfig)]
    schema = omegaconf.OmegaConf.structured(DataConfig)
    config = omegaconf.OmegaConf.to_object(omegaconf.OmegaConf.merge(schema, values))
    assert (config.name, config.source) == (name, name)
    dataset.check_config(dataclasses.replace(config, path="corpus") if name == "text" else config)
