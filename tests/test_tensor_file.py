"""Tensor files are written and read a piece at a time, with the bytes that safetensors has."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from xtrain.models import tensor_file
from xtrain.models.tensor_file import has_bits_of, put, read_header, write_tensors

SOURCE = np.random.default_rng(3)
TENSORS = {
    "model.b": SOURCE.standard_normal((5, 7)).astype(np.float32),
    "model.a": SOURCE.standard_normal(11).astype(np.float32),
    "updates": np.array([40]),
    "empty": np.zeros((0, 3), np.float32),
    "z\u00e4hler": np.array(2.5, np.float32),
}


@pytest.fixture(params=[16, 64 << 20])
def pieces(request, monkeypatch):
    """Pieces of four numbers, and of more than any tensor here."""
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", request.param)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_has_the_bytes_that_safetensors_writes(tmp_path, pieces, metadata):
    save_file(TENSORS, tmp_path / "theirs", metadata=metadata)
    write_tensors(tmp_path / "ours", TENSORS, np.asarray, metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_what_was_written_reads_back_the_same(tmp_path, pieces):
    write_tensors(tmp_path / "file", TENSORS, np.asarray)
    found = read_header(tmp_path / "file")
    assert found.keys() == TENSORS.keys() == load_file(tmp_path / "file").keys()
    for name, stored in found.items():
        assert has_bits_of(stored, TENSORS[name], np.asarray)
        view = np.full(stored.shape, np.nan, np.float32)
        put(stored, view, np.array)
        np.testing.assert_array_equal(view, TENSORS[name])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_widened(tmp_path, pieces, dtype):
    halves = SOURCE.standard_normal((3, 5)).astype(dtype)
    save_file({"x": halves}, tmp_path / "file")
    stored, view = read_header(tmp_path / "file")["x"], np.zeros((3, 5), np.float32)
    put(stored, view, np.array)
    np.testing.assert_array_equal(view, halves.astype(np.float32))
    assert has_bits_of(stored, halves, np.asarray)


def test_one_other_bit_another_shape_and_another_dtype_are_seen(tmp_path, pieces):
    write_tensors(tmp_path / "file", TENSORS, np.asarray)
    stored, other = read_header(tmp_path / "file")["model.b"], TENSORS["model.b"].copy()
    other.view(np.uint32)[-1, -1] ^= 1
    assert not has_bits_of(stored, other, np.asarray)
    assert not has_bits_of(stored, TENSORS["model.b"].reshape(7, 5), np.asarray)
    assert not has_bits_of(stored, TENSORS["model.b"].view(np.int32), np.asarray)


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{}", b"\xff" * 40])
def test_what_is_no_such_file_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(SafetensorError):
        read_header(tmp_path / "file")


def test_neither_writing_nor_reading_nor_comparing_takes_a_second_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 1 << 16)
    tensors = {f"layer.{i}": np.full((512, 512), i, np.float32) for i in range(8)}
    into = np.zeros((512, 512), np.float32)
    tracemalloc.start()
    try:
        write_tensors(tmp_path / "file", tensors, np.asarray)
        for name, stored in read_header(tmp_path / "file").items():
            put(stored, into, np.array)
            assert has_bits_of(stored, tensors[name], np.asarray)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20  # one tensor is as much
    finally:
        tracemalloc.stop()
