"""Named evaluation sets: made once, checked, told apart."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from xtrain.config.compose import compose, load_run
from xtrain.config.files import choices
from xtrain.data.dataset import DataConfig, prepare
from xtrain.data.eval_set import EvalSetConfig, compare, open_eval_set, read_eval_set
from xtrain.data.tokenizers.gpt2 import END_OF_TEXT_ID, load_gpt2
from xtrain.errors import UsageError

TEXTS = [f"Text number {n}. " + "Words of it, " * n for n in range(1, 31)]


@pytest.fixture
def files(tmp_path):
    """Three parquet files of ten texts each."""
    directory = tmp_path / "texts"
    directory.mkdir()
    for n in range(3):
        table = pyarrow.table({"text": TEXTS[10 * n : 10 * n + 10]})
        pyarrow.parquet.write_table(table, directory / f"00{n}.parquet")
    return directory


def made(tmp_path, files, **keys):
    cfg = EvalSetConfig(**{"name": "mine", "source": "text", "path": str(files), **keys})
    return open_eval_set(cfg, cache_dir=tmp_path / "cache")


def text_of(chosen):
    return load_gpt2().decode(chosen.shard.tokens[1:])


def joined(texts):
    return "".join(f"{text}<|endoftext|>" for text in texts)


def test_a_set_is_its_documents_with_an_end_of_text_before_and_behind_each(tmp_path, files):
    chosen = made(tmp_path, files)
    assert chosen.shard.tokens[0] == END_OF_TEXT_ID
    assert text_of(chosen) == joined(TEXTS)


def test_the_manifest_counts_what_is_predicted(tmp_path, files):
    chosen = made(tmp_path, files)
    assert chosen.manifest["tokens"] == len(chosen.shard.tokens) - 1
    assert chosen.manifest["bytes"] == sum(len(text) for text in TEXTS)
    assert chosen.manifest["documents"] == len(TEXTS) == chosen.shard.documents
    assert (chosen.manifest["name"], chosen.manifest["source"]) == ("mine", "text")
    assert chosen.manifest["tokenizer"] == load_gpt2().fingerprint


def test_a_set_of_fewer_tokens_is_the_beginning_and_of_the_tail_the_end(tmp_path, files):
    whole = made(tmp_path, files).shard.tokens
    first = made(tmp_path, files, tokens=100).shard.tokens
    last = made(tmp_path, files, tokens=100, tail=True).shard.tokens
    assert np.array_equal(first, whole[:101])
    assert np.array_equal(last[1:], whole[-100:]) and last[0] == END_OF_TEXT_ID


def test_one_file_of_several_is_chosen_by_its_number(tmp_path, files):
    chosen = made(tmp_path, files, source="fineweb_edu", file=1)
    assert text_of(chosen) == joined(TEXTS[10:20])
    with pytest.raises(UsageError, match=r"eval\.path=.*3 files, no file 3"):
        made(tmp_path, files, source="fineweb_edu", file=3)


def test_what_training_holds_out_is_the_set_and_nothing_of_it_is_trained_on(tmp_path, files):
    keys = {"order_seed": 3, "heldout_fraction": 0.2}
    chosen = made(tmp_path, files, **keys)
    data = DataConfig("mine", "text", path=str(files), **keys)
    prepared = prepare(data, cache_dir=tmp_path / "data")
    assert np.array_equal(chosen.shard.tokens[1:], prepared.heldout.tokens)
    sliced = prepare(DataConfig(**{**vars(data), "max_bytes": 2500}), cache_dir=tmp_path / "data")
    trained = load_gpt2().decode(sliced.train.tokens).split("<|endoftext|>")
    held_out = text_of(chosen).split("<|endoftext|>")
    assert set(trained) & set(held_out) == {""} and len(trained) > 5


def test_a_reserved_tail_is_neither_trained_on_nor_held_out(tmp_path, files):
    reserved = made(tmp_path, files, tokens=200, tail=True)
    data = DataConfig("mine", "text", path=str(files), reserved_tail_tokens=200)
    prepared = prepare(data, cache_dir=tmp_path / "data")
    used = [load_gpt2().decode(part.tokens) for part in (prepared.train, prepared.heldout)]
    documents = [text for part in used for text in part.split("<|endoftext|>")]
    left_out = set(TEXTS) - set(documents)
    assert left_out == set(TEXTS[-len(left_out) :]) and left_out
    whole = [text for text in text_of(reserved).split("<|endoftext|>")[1:] if text]
    assert set(whole) <= left_out


def test_a_set_is_made_once(tmp_path, files):
    path = made(tmp_path, files).shard.path
    before = path.stat()
    assert made(tmp_path, files).shard.path == path
    assert path.stat() == before


def test_another_text_is_another_set_and_the_same_text_elsewhere_is_not(tmp_path, files):
    first = made(tmp_path, files).sha256
    assert made(tmp_path / "elsewhere", files, name="theirs").sha256 == first
    (files / "000.parquet").unlink()
    assert made(tmp_path, files).sha256 != first


def test_tokens_that_are_not_the_sets_are_refused_with_both_fingerprints(tmp_path, files):
    found = made(tmp_path, files).sha256
    with pytest.raises(UsageError, match=f"{found}, but mine is {'0' * 64}"):
        made(tmp_path, files, sha256="0" * 64)


@pytest.mark.parametrize("file", ["tokens.bin", "manifest.json"])
def test_a_damaged_set_is_named(tmp_path, files, file):
    directory = made(tmp_path, files).shard.path.parent
    content = (directory / file).read_bytes()
    (directory / file).write_bytes(content[:-9] + b"123456789")
    with pytest.raises(UsageError, match=file):
        read_eval_set(directory)


def test_a_manifest_of_another_set_is_refused(tmp_path, files):
    directory = made(tmp_path, files).shard.path.parent
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | {"sha256": "0" * 64}))
    with pytest.raises(UsageError, match="not of this token file"):
        read_eval_set(directory)


def test_a_failed_set_leaves_nothing_behind(tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UsageError, match="eval=mine: no text"):
        made(tmp_path, tmp_path / "empty.jsonl")
    assert not (tmp_path / "cache").exists()


def result(sha256, loss, error, name="a"):
    return {"set": {"name": name, "sha256": sha256}, "loss": loss, "standard_error": error}


def test_two_results_of_one_set_have_a_difference_with_a_standard_error():
    change, error = compare(result("aa", 3.0, 0.03), result("aa", 3.5, 0.04, name="b"))
    assert (change, error) == pytest.approx((-0.5, 0.05))


def test_results_of_different_sets_are_refused_with_both_fingerprints():
    with pytest.raises(UsageError, match="a aa and b bb"):
        compare(result("aa", 3.0, 0.1), result("bb", 3.0, 0.1, name="b"))


@pytest.mark.parametrize("name", choices("eval"))
def test_an_evaluation_set_file_is_named_as_the_set(name):
    run = load_run(compose([f"eval={name}", "eval.path=somewhere"]))
    assert run.eval.name == name


def test_the_embedded_set_is_the_one_whose_fingerprint_is_recorded(tmp_path):
    cfg = load_run(compose([])).eval
    assert cfg.name == "sotu_v1" and cfg.sha256
    assert open_eval_set(cfg, cache_dir=tmp_path).manifest["tokens"] == 131_072


def test_offline_the_hubs_set_is_refused_in_one_line_that_names_the_embedded_one(
    tmp_path, monkeypatch
):
    pytest.importorskip("datasets")

    def offline(*arguments):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("xtrain.data.sources._stream_hub", offline)
    cfg = load_run(compose(["eval=eval_v1"])).eval
    with pytest.raises(UsageError, match=r"^eval=eval_v1: cannot read .*use eval=sotu_v1") as said:
        open_eval_set(cfg, cache_dir=tmp_path)
    assert "\n" not in str(said.value)
    assert list(tmp_path.iterdir()) == []
