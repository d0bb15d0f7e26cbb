"""Windows over a token stream: order, epochs, resume, document boundaries, evaluation."""

import hashlib

import numpy as np
import pytest

from xtrain.data.packing import IGNORED, EvalWindows, PackedWindows, permutation
from xtrain.data.shards import ShardWriter, open_shard
from xtrain.errors import UsageError

TOKENIZER = hashlib.sha256(b"a tokenizer").hexdigest()


def make_shard(tmp_path, lengths):
    """A shard whose token at position p is p."""
    path = tmp_path / "stream.bin"
    with ShardWriter(path, vocab_size=60000, tokenizer=TOKENIZER) as writer:
        for length in lengths:
            writer.append(np.arange(writer.tokens, writer.tokens + length))
    return open_shard(path)


def windows_of(batch, seq_len):
    return (batch["input_ids"][..., 0] // seq_len).ravel().tolist()


def test_a_batch_has_shifted_targets_in_int32(tmp_path):
    source = PackedWindows(
        make_shard(tmp_path, [101]), seed=0, batch_size=3, seq_len=10, accumulation=2
    )
    batch = source.batch(0)
    assert set(batch) == {"input_ids", "targets"}
    assert batch["input_ids"].shape == batch["targets"].shape == (2, 3, 10)
    assert batch["input_ids"].dtype == batch["targets"].dtype == np.int32
    assert (batch["targets"] == batch["input_ids"] + 1).all()
    assert (batch["input_ids"][..., 0] % 10 == 0).all()


# 10 windows: batches that divide an epoch, that straddle its end, and that hold several epochs.
@pytest.mark.parametrize("batch_size, accumulation", [(5, 1), (3, 1), (2, 2), (7, 1), (8, 3)])
def test_every_window_comes_exactly_once_an_epoch(tmp_path, batch_size, accumulation):
    source = PackedWindows(
        make_shard(tmp_path, [105]),
        seed=1,
        batch_size=batch_size,
        seq_len=10,
        accumulation=accumulation,
    )
    seen = [w for step in range(30) for w in windows_of(source.batch(step), 10)]
    for epoch in range(len(seen) // 10):
        assert sorted(seen[epoch * 10 : epoch * 10 + 10]) == list(range(10))


def test_every_epoch_has_its_own_order(tmp_path):
    source = PackedWindows(make_shard(tmp_path, [105]), seed=1, batch_size=10, seq_len=10)
    orders = {tuple(windows_of(source.batch(step), 10)) for step in range(4)}
    assert len(orders) == 4


def test_resuming_twice_keeps_every_sample_once_an_epoch(tmp_path):
    shard = make_shard(tmp_path, [105])

    def fresh():
        return PackedWindows(shard, seed=1, batch_size=3, seq_len=10)

    seen = []
    # Stopped at 90 % of the first epoch and once more inside the second.
    for steps in (range(3), range(3, 5), range(5, 10)):
        source = fresh()
        seen += [w for step in steps for w in windows_of(source.batch(step), 10)]
    uninterrupted = fresh()
    assert seen == [w for s in range(10) for w in windows_of(uninterrupted.batch(s), 10)]
    for epoch in range(3):
        assert sorted(seen[epoch * 10 : epoch * 10 + 10]) == list(range(10))


def test_batches_do_not_depend_on_the_order_of_asking(tmp_path):
    source = PackedWindows(make_shard(tmp_path, [300]), seed=3, batch_size=4, seq_len=10)
    forward = [source.batch(step)["input_ids"] for step in range(20)]
    for step in reversed(range(20)):
        assert (source.batch(step)["input_ids"] == forward[step]).all()


def test_numpys_global_state_changes_nothing(tmp_path):
    source = PackedWindows(make_shard(tmp_path, [300]), seed=3, batch_size=4, seq_len=10)
    before = source.batch(0)["input_ids"]
    np.random.seed(7)
    permutation.cache_clear()
    assert (source.batch(0)["input_ids"] == before).all()


def test_seed_and_epoch_change_the_order():
    orders = [permutation(seed, epoch, 50).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_is_the_one_that_checkpoints_of_other_machines_had():
    assert permutation(0, 0, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]


def test_accumulation_and_batch_share_one_order(tmp_path):
    shard = make_shard(tmp_path, [300])
    wide = PackedWindows(shard, seed=0, batch_size=6, seq_len=10)
    deep = PackedWindows(shard, seed=0, batch_size=2, seq_len=10, accumulation=3)
    for step in range(8):
        a, b = wide.batch(step)["input_ids"], deep.batch(step)["input_ids"]
        assert (a.reshape(6, 10) == b.reshape(6, 10)).all()


def test_epochs_are_counted_in_windows(tmp_path):
    source = PackedWindows(make_shard(tmp_path, [105]), seed=0, batch_size=4, seq_len=10)
    assert source.windows == 10
    assert source.steps_per_epoch == 3
    assert [source.epoch(step) for step in (0, 5, 10)] == [0.0, 2.0, 4.0]


def test_the_fingerprint_names_all_that_decides_the_batches(tmp_path):
    shard = make_shard(tmp_path, [105])
    base = {"seed": 0, "batch_size": 2, "seq_len": 5, "accumulation": 1}
    other = [{"seed": 1}, {"batch_size": 1}, {"seq_len": 4}, {"accumulation": 2}]
    other += [{"respect_documents": True}]
    prints = {PackedWindows(shard, **(base | change)).fingerprint for change in [{}, *other]}
    assert len(prints) == 6
    assert PackedWindows(shard, **base).fingerprint in prints


def test_a_sequence_longer_than_the_data_is_refused(tmp_path):
    shard = make_shard(tmp_path, [10])
    PackedWindows(shard, seed=0, batch_size=1, seq_len=9)
    with pytest.raises(UsageError, match="train.seq_len=10: longer than the training data, 10 tok"):
        PackedWindows(shard, seed=0, batch_size=1, seq_len=10)


@pytest.mark.parametrize("key", ["batch_size", "seq_len", "accumulation"])
def test_sizes_below_one_are_refused(tmp_path, key):
    sizes = {"batch_size": 1, "seq_len": 5, "accumulation": 1, key: 0}
    with pytest.raises(UsageError, match=f"train.{key}=0: use 1 or more"):
        PackedWindows(make_shard(tmp_path, [50]), seed=0, **sizes)


def reference_documents(lengths, start, seq_len):
    """Targets and starts of one row, token by token."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    targets, starts = [], []
    for i in range(seq_len):
        p = start + i
        same = document[p + 1] == document[p]
        targets.append(p + 1 if same else IGNORED)
        starts.append(max(int(np.argmax(document == document[p])) - start, 0))
    return targets, starts


@pytest.mark.parametrize(
    "lengths", [[41], [1] * 41, [5, 5, 5, 5, 5, 5, 5, 6], [3, 20, 1, 1, 16], [40, 1], [1, 40]]
)
def test_documents_are_kept_apart(tmp_path, lengths):
    source = PackedWindows(
        make_shard(tmp_path, lengths), seed=0, batch_size=4, seq_len=10, respect_documents=True
    )
    batch = source.batch(0)
    assert batch["starts"].shape == (1, 4, 10)
    assert batch["starts"].dtype == np.int32
    for row in range(4):
        start = int(batch["input_ids"][0, row, 0])
        targets, starts = reference_documents(lengths, start, 10)
        assert batch["targets"][0, row].tolist() == targets
        assert batch["starts"][0, row].tolist() == starts


@pytest.mark.parametrize("max_tokens", [1, 9, 10, 11, 42, 1000, None])
def test_evaluation_has_the_same_targets_for_any_batch(tmp_path, max_tokens):
    source = EvalWindows(make_shard(tmp_path, [43]), seq_len=10, max_tokens=max_tokens)
    expected = list(range(1, 1 + min(max_tokens or 42, 42)))
    assert source.tokens == len(expected)
    for batch_size in (1, 3, 7, 32):
        seen = []
        for batch in source.batches(batch_size):
            assert batch["input_ids"].shape == batch["targets"].shape == (batch_size, 10)
            valid = batch["targets"] != IGNORED
            assert (batch["targets"] == batch["input_ids"] + 1)[valid].all()
            seen += batch["targets"][valid].tolist()
        assert seen == expected


def test_evaluation_of_a_text_shorter_than_a_sequence_is_padded(tmp_path):
    (batch,) = EvalWindows(make_shard(tmp_path, [4]), seq_len=10).batches(1)
    assert batch["targets"][0].tolist() == [1, 2, 3] + [IGNORED] * 7


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_evaluation_can_keep_documents_apart(tmp_path, batch_size):
    source = EvalWindows(make_shard(tmp_path, [3, 20, 1, 19]), seq_len=10, respect_documents=True)
    rows = [row for b in source.batches(batch_size) for row in b["targets"]]
    targets = np.concatenate(rows)
    assert sorted(set(range(1, 43)) - set(targets.tolist())) == [3, 23, 24]
    starts = np.concatenate([row for b in source.batches(batch_size) for row in b["starts"]])
    assert starts[:43].tolist() == (
        [0] * 3 + [3] * 7 + [0] * 10 + [0] * 3 + [3] + [4] * 6 + [0] * 10 + [0] * 3
    )


def test_the_evaluation_fingerprint_names_the_set(tmp_path):
    shard = make_shard(tmp_path, [43])
    sets = [(10, None), (10, 20), (7, None)]
    assert len({EvalWindows(shard, seq_len=t, max_tokens=m).fingerprint for t, m in sets}) == 3
    whole = EvalWindows(shard, seq_len=10)
    assert whole.fingerprint == EvalWindows(shard, seq_len=10, max_tokens=99).fingerprint


def test_one_token_is_too_few_to_evaluate_on(tmp_path):
    with pytest.raises(UsageError, match="1 token is too few"):
        EvalWindows(make_shard(tmp_path, [1]), seq_len=4)
