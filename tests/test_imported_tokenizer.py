"""The tokenizer of a Hugging Face directory, against the library and against GPT-2's own."""

import hashlib
import json

import numpy as np
import pytest

from xtrain.data.dataset import DataConfig, prepare
from xtrain.data.eval_set import EvalSetConfig, open_eval_set
from xtrain.data.tokenizers import imported as imported_tokenizer
from xtrain.data.tokenizers.gpt2 import load_gpt2
from xtrain.data.tokenizers.hf_files import write_hf_tokenizer
from xtrain.data.tokenizers.imported import ImportedTokenizer, end_ids, load_tokenizer
from xtrain.errors import UsageError

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [
    "Hello, world.",
    "",
    "  two  spaces\n\n\tand a tab",
    "na\u00efve \u6f22\u5b57 \U0001f642",
    "a<|endoftext|>b<|im_end|>c",
]


@pytest.fixture(scope="module")
def gpt2_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gpt2")
    write_hf_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A byte-level BPE with two special tokens; the last id is an added one."""
    directory = tmp_path_factory.mktemp("own")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator(
        TEXTS * 5,
        tokenizers.trainers.BpeTrainer(
            vocab_size=320,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    made.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    made.enable_truncation(3)
    made.enable_padding(length=9)
    made.save(str(directory / "tokenizer.json"))
    return directory


def test_the_recorded_fingerprint_is_of_the_file_that_an_export_holds(gpt2_directory):
    content = (gpt2_directory / "tokenizer.json").read_bytes()
    assert hashlib.sha256(content).hexdigest() == imported_tokenizer.GPT2_SHA256


def test_an_export_is_read_with_the_tokenizer_that_training_used(gpt2_directory):
    assert load_tokenizer(gpt2_directory) is load_gpt2() is load_tokenizer(None)


def test_the_same_vocabulary_gives_the_ids_and_bytes_of_gpt2(gpt2_directory):
    theirs, ours = ImportedTokenizer(gpt2_directory), load_gpt2()
    assert (theirs.vocab_size, theirs.eot) == (ours.vocab_size, ours.eot)
    for text in TEXTS:
        ids = ours.encode_ordinary(text)
        assert theirs.encode_ordinary(text) == ids
        assert theirs.decode(ids) == ours.decode(ids) == text
        (document,), (same,) = theirs.encode_documents([text]), ours.encode_documents([text])
        assert document.ids.tolist() == same.ids.tolist() == [*ids, ours.eot]
        assert document.sizes.tolist() == same.sizes.tolist()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_batch_is_encoded_as_its_texts(own, workers):
    tokenizer = load_tokenizer(own)
    batch = tokenizer.encode_batch(TEXTS, workers=workers)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode_ordinary(t) for t in TEXTS]
    assert all(ids.dtype == np.uint32 for ids in batch)


def test_special_tokens_in_a_text_are_ordinary_and_truncation_and_padding_are_off(own):
    tokenizer = load_tokenizer(own)
    for text in TEXTS:
        ids = tokenizer.encode_ordinary(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eot not in ids


def test_bytes_are_counted_by_token_and_none_for_the_end_of_text(own):
    for text, document in zip(TEXTS, load_tokenizer(own).encode_documents(TEXTS), strict=True):
        assert document.text_bytes == len(text.encode())
        assert document.sizes[-1] == 0


def changed(own, directory, **parts):
    """The directory with a copy of the tokenizer `own` whose parts are others."""
    content = json.loads((own / "tokenizer.json").read_text())
    model = parts.pop("model", {})
    content |= parts
    content["model"] |= model
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


NFC = {"type": "NFC"}
STRIPPED = {
    "type": "Sequence",
    "normalizers": [
        NFC,
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Lowercase"},
    ],
}
# Bytes that no normal form keeps: letters with separate marks, wide spaces at both ends, Angstrom.
ODD = [
    "e\u0301te\u0301 e\u0301",
    "\u2003 Caf\u00e9 \u2003\n",
    "\u212b\u1e9b\u0323 \U0001f642 na\u00efve",
    "",
]


@pytest.mark.parametrize("normalizer", [NFC, STRIPPED], ids=["NFC", "stripped"])
def test_bytes_are_those_of_the_text_as_it_was_not_of_its_normal_form(own, tmp_path, normalizer):
    tokenizer = load_tokenizer(changed(own, tmp_path, normalizer=normalizer))
    for text, document in zip(ODD, tokenizer.encode_documents(ODD), strict=True):
        assert document.ids.tolist() == [*tokenizer.encode_ordinary(text), tokenizer.eot]
        assert document.text_bytes == len(text.encode())
        assert (document.sizes >= 0).all()
        for cut in range(len(document) + 1):
            parts = document[:cut].text_bytes + document[cut:].text_bytes
            assert parts == document.text_bytes


def test_a_preparation_with_a_normalising_tokenizer_counts_the_bytes_of_the_files(own, tmp_path):
    directory = changed(own, tmp_path, normalizer=NFC)
    lines = [{"text": text * 9} for text in ODD]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = DataConfig("a", "text", str(tmp_path / "a.jsonl"), tokenizer=str(directory))
    manifest = prepare(config, cache_dir=tmp_path / "cache").manifest
    counted = manifest["train"]["bytes"] + manifest["heldout"]["bytes"]
    assert counted == sum(len(line["text"].encode()) for line in lines)


PANICS = {"type": "FixedLength", "length": 0}  # "chunk size must be non-zero", no Exception


@pytest.mark.parametrize("order_seed", [None, 0])
def test_a_text_that_the_tokenizer_fails_on_is_named_with_its_file(own, tmp_path, order_seed):
    directory = changed(own, tmp_path, pre_tokenizer=PANICS)
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n{"text": "the one"}\n')
    config = DataConfig(
        *("a", "text", str(tmp_path / "a.jsonl")),
        tokenizer=str(directory),
        order_seed=order_seed,
    )
    with pytest.raises(UsageError) as caught:
        prepare(config, cache_dir=tmp_path / "cache")
    assert str(caught.value).startswith(f"{tmp_path / 'a.jsonl'}, document 2: {directory}")
    assert "begins 'the one': chunk size must be non-zero; leave the text out" in str(caught.value)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(UsageError, match=r"a\.jsonl, document 2: .* fails on a text"):
        open_eval_set(
            EvalSetConfig("e", "text", str(tmp_path / "a.jsonl")),
            cache_dir=tmp_path / "cache",
            tokenizer=load_tokenizer(directory),
        )
    with pytest.raises(UsageError, match="fails on a text"):
        load_tokenizer(directory).encode_ordinary("a prompt")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "cannot be read"),
        ({"normalizer": "NFC"}, "cannot be read"),
        ({"model": {"dropout": 0.5}}, "dropout=0.5"),
        (
            {"model": {"vocab": {"a": 4294967295, "<|endoftext|>": 0}, "merges": []}},
            "4294967296 ids",
        ),
        ({"model": {"vocab": [], "merges": 7}}, "cannot be read"),
    ],
)
def test_a_tokenizer_file_with_other_values_is_refused(own, tmp_path, parts, message):
    with pytest.raises(UsageError, match=message) as caught:
        load_tokenizer(changed(own, tmp_path, **parts))
    assert str(caught.value).startswith(str(tmp_path / "tokenizer.json"))
    assert "\n" not in str(caught.value)


def test_the_id_between_documents_is_that_of_the_end_of_text(own):
    tokenizer = load_tokenizer(own)
    assert tokenizer.decode([tokenizer.eot]) == "<|endoftext|>"
    assert tokenizer.vocab_size == tokenizer.eot + 2


def test_without_such_a_token_the_configs_eos_is_it(own, tmp_path):
    content = json.loads((own / "tokenizer.json").read_text())
    content["added_tokens"] = content["added_tokens"][1:]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="neither .* nor an eos_token_id"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": [7, 9]}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 11}')
    assert load_tokenizer(tmp_path).eot == 7
    assert end_ids(tmp_path) == [7, 9, 11]
    (tmp_path / "config.json").write_text('{"eos_token_id": 100000}')
    with pytest.raises(UsageError, match="eos_token_id=100000"):
        load_tokenizer(tmp_path)


def test_other_words_and_another_end_are_another_fingerprint(own, gpt2_directory):
    prints = {ImportedTokenizer(each).fingerprint for each in (own, gpt2_directory)}
    assert len(prints | {load_gpt2().fingerprint}) == 3


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": "1.0"}'])
def test_a_damaged_file_is_named_in_one_line(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UsageError, match=r"tokenizer\.json cannot be read") as said:
        load_tokenizer(tmp_path)
    assert "\n" not in str(said.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"no readable tokenizer\.json"):
        load_tokenizer(tmp_path)
