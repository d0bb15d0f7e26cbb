"""Token shards: round trip, atomic writing, and every kind of damage refused by name."""

import hashlib

import numpy as np
import pytest

from xtrain.data.shards import ShardWriter, open_shard
from xtrain.errors import UsageError

TOKENIZER = hashlib.sha256(b"a tokenizer").hexdigest()


def write_shard(path, documents, vocab_size=50257):
    with ShardWriter(path, vocab_size=vocab_size, tokenizer=TOKENIZER) as writer:
        for ids in documents:
            writer.append(np.asarray(ids))
    return path


@pytest.fixture
def path(tmp_path):
    return write_shard(tmp_path / "train.bin", [[1, 2, 3], [4], [5, 6, 50256]])


def test_tokens_and_documents_come_back(path):
    shard = open_shard(path, vocab_size=50257, tokenizer=TOKENIZER)
    assert shard.tokens.tolist() == [1, 2, 3, 4, 5, 6, 50256]
    assert shard.offsets.tolist() == [0, 3, 4, 7]
    assert (shard.documents, shard.vocab_size, shard.tokenizer) == (3, 50257, TOKENIZER)


@pytest.mark.parametrize("vocab_size, dtype", [(65536, "uint16"), (65537, "uint32")])
def test_ids_are_as_wide_as_the_vocabulary_needs(tmp_path, vocab_size, dtype):
    ids = [0, vocab_size - 1, 7]
    shard = open_shard(write_shard(tmp_path / "s.bin", [ids], vocab_size))
    assert shard.tokens.dtype == dtype
    assert shard.tokens.tolist() == ids


def test_an_open_shard_cannot_be_written(path):
    with pytest.raises(ValueError, match="read-only"):
        open_shard(path).tokens[0] = 1


def test_equal_content_gives_equal_bytes_and_fingerprint(tmp_path, path):
    again = write_shard(tmp_path / "again.bin", [[1, 2, 3], [4], [5, 6, 50256]])
    assert again.read_bytes() == path.read_bytes()
    assert open_shard(again).fingerprint == open_shard(path).fingerprint


def test_other_document_boundaries_give_another_fingerprint(tmp_path, path):
    other = write_shard(tmp_path / "other.bin", [[1, 2], [3, 4], [5, 6, 50256]])
    assert open_shard(other).fingerprint != open_shard(path).fingerprint


def test_every_flipped_bit_is_noticed(path):
    good = path.read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        path.write_bytes(bad)
        with pytest.raises(UsageError, match="train.bin: (not a )?token shard"):
            open_shard(path, verify=True)


def test_every_truncation_is_noticed(path):
    good = path.read_bytes()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(UsageError, match="train.bin: (not a )?token shard"):
            open_shard(path)


def test_a_truncated_shard_says_how_much_is_missing(path):
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UsageError, match=f"truncated: {size - 5} bytes, expected {size}"):
        open_shard(path)


def test_a_flipped_payload_bit_is_called_damage_of_the_payload(path):
    bad = bytearray(path.read_bytes())
    bad[256] ^= 1
    path.write_bytes(bad)
    with pytest.raises(UsageError, match="shard damaged: payload sha256"):
        open_shard(path)


def test_bytes_behind_the_end_are_refused(path):
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(UsageError, match="too long"):
        open_shard(path)


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "photo.bin"
    path.write_bytes(b"\x89PNG" * 200)
    with pytest.raises(UsageError, match="photo.bin: not a token shard"):
        open_shard(path)


def test_a_missing_file_is_one_clear_line(tmp_path):
    with pytest.raises(UsageError, match="none.bin: cannot open the token shard: No such file"):
        open_shard(tmp_path / "none.bin")


def rewrite_header(path, offset, value):
    """Put a 32-bit `value` at `offset` of the header and make its checksum right again."""
    content = bytearray(path.read_bytes())
    content[offset : offset + 4] = value.to_bytes(4, "little")
    content[224:256] = hashlib.sha256(content[:224]).digest()
    path.write_bytes(content)


def test_another_version_is_named(path):
    rewrite_header(path, 8, 2)
    with pytest.raises(UsageError, match="shard of version 2, expected 1"):
        open_shard(path)


def test_another_vocabulary_is_refused(path):
    with pytest.raises(UsageError, match="for a vocabulary of 50257, not 32000"):
        open_shard(path, vocab_size=32000)


def test_another_tokenizer_is_refused(path):
    with pytest.raises(UsageError, match=f"of tokenizer {TOKENIZER[:12]}, not {'0' * 12}"):
        open_shard(path, tokenizer="0" * 64)


def test_a_width_that_the_vocabulary_does_not_have_is_refused(path):
    rewrite_header(path, 12, 4)
    with pytest.raises(UsageError, match="4 bytes a token for a vocabulary of 50257"):
        open_shard(path)


def test_a_shard_without_tokens_is_refused(tmp_path):
    path = write_shard(tmp_path / "empty.bin", [])
    with pytest.raises(UsageError, match="without tokens"):
        open_shard(path)


def test_an_exception_while_writing_leaves_nothing(tmp_path):
    with (
        pytest.raises(RuntimeError),
        ShardWriter(tmp_path / "s.bin", vocab_size=10, tokenizer=TOKENIZER) as writer,
    ):
        writer.append(np.array([1, 2]))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_an_exception_while_writing_keeps_the_shard_that_was_there(path):
    before = path.read_bytes()
    with (
        pytest.raises(RuntimeError),
        ShardWriter(path, vocab_size=50257, tokenizer=TOKENIZER) as writer,
    ):
        writer.append(np.array([9]))
        raise RuntimeError
    assert path.read_bytes() == before
    assert open_shard(path).tokens[0] == 1


def test_a_replaced_file_is_hashed_again(path):
    open_shard(path)
    write_shard(path, [[9, 9, 9], [4], [5, 6, 50256]])
    assert open_shard(path).tokens[0] == 9


def remade(path, change):
    """The shard with other bytes in its payload, and hashes that agree with them."""
    raw = bytearray(path.read_bytes())
    payload = np.frombuffer(raw[256:], np.uint8).copy()
    change(payload)
    fields = bytearray(raw[:224])
    at = 8 + 4 + 4 + 8 + 8 + 8
    fields[at : at + 32] = hashlib.sha256(payload.tobytes()).digest()
    path.write_bytes(bytes(fields) + hashlib.sha256(fields).digest() + payload.tobytes())
    return path


def test_ids_beyond_the_vocabulary_are_refused_whatever_the_hashes_say(path):
    remade(path, lambda payload: payload.view("<u2").__setitem__(3, 50257))
    with pytest.raises(UsageError, match="id 50257 in a vocabulary of 50257"):
        open_shard(path)


@pytest.mark.parametrize(("number", "value"), [(0, 1), (1, 0), (2, 3), (2, 2**63), (3, 6)])
def test_documents_that_do_not_follow_each_other_are_refused(path, number, value):
    remade(path, lambda payload: payload.view("<u8")[-4:].__setitem__(number, value))
    with pytest.raises(UsageError, match="documents do not follow each other"):
        open_shard(path)


def test_a_name_longer_than_any_file_is_refused():
    with pytest.raises(UsageError, match="File name too long"):
        open_shard("x" * 5000)
