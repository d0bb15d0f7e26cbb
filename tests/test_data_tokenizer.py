"""The GPT-2 tokenizer: ids, pieces, bytes, the damaged table, and the Hugging Face files."""

import json
import random

import pytest

from xtrain.data.tokenizers import gpt2 as tokenizer_module
from xtrain.data.tokenizers.gpt2 import load_gpt2
from xtrain.data.tokenizers.hf_files import write_hf_tokenizer
from xtrain.errors import UsageError

ALPHABET = [chr(c) for c in range(1, 127)] + list("\x85\xa0\u0301\u3000\u4e2d\u00e9\U0001f600")
ALPHABET += ["  ", "'ll", "\r\n", " the", "<|endoftext|>"]


def random_texts(count: int, length: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=rng.randint(0, length))) for _ in range(count)]


def test_known_text_has_gpt2s_ids():
    assert load_gpt2().encode_ordinary("Hello world, it's 2024!") == [
        *(15496, 995, 11, 340, 338, 48609, 0)
    ]


def test_end_of_text_in_a_document_is_ordinary_text():
    tokenizer = load_gpt2()
    ids = tokenizer.encode_ordinary("a<|endoftext|>b")
    assert tokenizer.eot not in ids
    assert tokenizer.eot not in tokenizer.encode_batch(["a<|endoftext|>b"])[0]
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_decode_inverts_encode_for_any_unicode():
    tokenizer = load_gpt2()
    for text in random_texts(300, 60):
        assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text


def test_a_batch_gives_the_ids_of_each_text():
    tokenizer = load_gpt2()
    texts = random_texts(50, 60)
    encoded = tokenizer.encode_batch(texts, workers=2)
    assert [ids.tolist() for ids in encoded] == [tokenizer.encode_ordinary(t) for t in texts]


@pytest.mark.parametrize("piece_chars", [1, 2, 7, 64])
def test_splitting_a_long_text_does_not_change_its_ids(monkeypatch, piece_chars):
    tokenizer = load_gpt2()
    texts = random_texts(100, 300, seed=piece_chars) + ["a \n\n b  ", " x" * 100, "\n" * 100]
    expected = [tokenizer.encode_ordinary(text) for text in texts]
    monkeypatch.setattr(tokenizer_module, "_PIECE_CHARS", piece_chars)
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts, workers=1)] == expected


def test_a_million_equal_characters_are_encoded():
    tokenizer = load_gpt2()
    for character in " a\n\u4e2d":
        text = character * 1_000_000
        assert tokenizer.encode_documents([text])[0].text_bytes == len(text.encode())


def test_a_document_counts_its_utf8_bytes_and_none_for_the_end_of_text():
    text = "\u00e9t\u00e9 \u4e2d"
    (document,) = load_gpt2().encode_documents([text])
    assert document.ids[-1] == load_gpt2().eot
    assert document.sizes[-1] == 0
    assert document.text_bytes == len(text.encode())
    assert document[:2].text_bytes + document[2:].text_bytes == len(text.encode())


@pytest.mark.parametrize("token", [-1, 50257, 50303])
def test_decoding_an_id_outside_the_vocabulary_is_an_error(token):
    with pytest.raises(ValueError, match=f"{token} is outside the vocabulary of 50257"):
        load_gpt2().decode([token])


def test_a_damaged_rank_table_is_refused(tmp_path):
    path = tmp_path / "gpt2.tiktoken"
    path.write_bytes(tokenizer_module._RANKS_PATH.read_bytes()[:-1])
    with pytest.raises(UsageError, match="gpt2.tiktoken: the GPT-2 rank table is damaged"):
        tokenizer_module._read_ranks(path)


def test_a_missing_rank_table_is_one_clear_line(tmp_path):
    with pytest.raises(UsageError, match="rank table is missing; reinstall"):
        tokenizer_module._read_ranks(tmp_path / "none")


def test_hugging_face_files_are_the_same_bytes_every_time(tmp_path):
    first = [path.read_bytes() for path in write_hf_tokenizer(tmp_path / "a")]
    assert first == [path.read_bytes() for path in write_hf_tokenizer(tmp_path / "b")]


def test_hugging_face_vocabulary_and_merges_are_complete(tmp_path):
    model = json.loads(write_hf_tokenizer(tmp_path)[0].read_text())["model"]
    assert sorted(model["vocab"].values()) == list(range(50257))
    assert len(model["merges"]) == 50000
    assert model["merges"][:2] == ["\u0120 t", "\u0120 a"]


def test_transformers_gives_the_same_ids_beside_a_qwen3_config(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_hf_tokenizer(tmp_path)
    # With this file AutoTokenizer knows the model and would rather take the model's own class.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 50257}))
    ours, theirs = load_gpt2(), transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [text.replace("<|endoftext|>", "") for text in random_texts(500, 60)]
    assert theirs(texts)["input_ids"] == [ours.encode_ordinary(text) for text in texts]
    assert [theirs.decode(ours.encode_ordinary(text)) for text in texts] == texts


def test_transformers_takes_end_of_text_as_special(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_hf_tokenizer(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs.encode("a<|endoftext|>b") == [64, 50256, 65]
    assert (len(theirs), theirs.eos_token_id, theirs.bos_token_id) == (50257, 50256, 50256)
    assert theirs.decode([64, 50256, 65], skip_special_tokens=True) == "ab"
