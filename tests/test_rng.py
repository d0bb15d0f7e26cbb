"""Philox4x32-10 against its published vectors, and the streams that are cut from it."""

import numpy as np
import pytest

from xtrain.engine import rng

KEY = rng.key_array(np, 7, 3, 1)
SITE = rng.site_of("a use")


def blocks(*numbers):
    return tuple(np.array([n], np.uint32) for n in numbers)


# Random123 (Salmon et al.), kat_vectors, philox4x32 10: counter, key, output.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_words(counter, key, expected):
    words = rng.philox(np, blocks(*counter), blocks(*key))
    assert tuple(int(w[0]) for w in words) == expected


def test_bits_are_the_words_of_consecutive_counters():
    key = rng.key_array(np, 0x299F31D0A4093822, 5, 9)
    drawn = rng.bits(np, 10, key, 77)
    for block in range(3):
        words = rng.philox(np, blocks(block, 77, 5, 9), blocks(0xA4093822, 0x299F31D0))
        expected = [int(w[0]) for w in words][: 10 - 4 * block]
        assert drawn[4 * block : 4 * block + 4].tolist() == expected


def test_an_element_does_not_depend_on_how_many_are_drawn():
    longest = rng.bits(np, 1001, KEY, SITE)
    for n in (0, 1, 3, 4, 5, 1000):
        np.testing.assert_array_equal(rng.bits(np, n, KEY, SITE), longest[:n])


@pytest.mark.parametrize("start", [0, 1, 4, 6, 998, 1001])
def test_any_range_of_a_stream_can_be_drawn_alone(start):
    longest = rng.bits(np, 1001, KEY, SITE)
    for n in (0, 1, 2, 3, 5, 1001):
        n = min(n, 1001 - start)
        found = rng.bits(np, n, KEY, SITE, start=start)
        assert found.dtype == np.uint32
        np.testing.assert_array_equal(found, longest[start : start + n])


def test_a_stream_goes_on_to_its_last_counter():
    drawn = rng.bits(np, 7, KEY, SITE, start=2**34 - 7)
    counters = (np.uint32([2**32 - 2, 2**32 - 1]), *blocks(SITE, 3, 1))
    words = np.stack(rng.philox(np, counters, blocks(7, 0)), axis=1)
    np.testing.assert_array_equal(drawn, words.reshape(-1)[1:])


@pytest.mark.parametrize(("n", "start"), [(1, 2**34), (2, 2**34 - 1), (1, -1), (-1, 3)])
def test_a_range_outside_the_stream_is_refused(n, start):
    with pytest.raises(ValueError, match="not within a stream's"):
        rng.bits(np, n, KEY, SITE, start=start)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 5])
def test_a_seed_uses_both_words_of_the_key(seed):
    key = rng.key_array(np, seed, 1)
    assert int(key[0]) + (int(key[1]) << 32) == seed


@pytest.mark.parametrize(
    "other",
    [
        rng.key_array(np, 8, 3, 1),
        rng.key_array(np, 7 + 2**32, 3, 1),
        rng.key_array(np, 7, 4, 1),
        rng.key_array(np, 7, 3, 2),
    ],
    ids=["seed", "high word of the seed", "step", "micro-batch"],
)
def test_another_key_gives_an_independent_stream(other):
    require_independent(rng.bits(np, 40_000, KEY, SITE), rng.bits(np, 40_000, other, SITE))


def test_another_site_gives_an_independent_stream():
    site = rng.site_of("another use")
    require_independent(rng.bits(np, 40_000, KEY, SITE), rng.bits(np, 40_000, KEY, site))


def test_site_numbers_are_the_same_in_every_process():
    assert rng.site_of("dropout/0/attn") == 0x124247D5


def test_the_sites_of_a_model_differ():
    names = [f"dropout/{layer}/{part}" for layer in range(64) for part in ("attn", "mlp")]
    assert len({rng.site_of(name) for name in names}) == len(names)


def test_uniform_numbers_fill_the_unit_interval_evenly():
    drawn = rng.uniform(np, 100_000, KEY, SITE)
    assert drawn.dtype == np.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, bins=50, range=(0, 1))[0]
    chi2 = ((counts - 2000) ** 2 / 2000).sum()
    assert abs(chi2 - 49) < 4 * np.sqrt(2 * 49)  # chi-squared with 49 degrees of freedom


def test_normal_numbers_are_box_muller_of_the_two_halves_of_the_stream():
    for n in (0, 1, 2, 7, 1000, 4099):
        half = -(-n // 2)
        words = rng.bits(np, 2 * half, KEY, SITE).astype(np.float64)
        radius = np.sqrt(-2.0 * np.log((words[:half] + 1.0) * 2.0**-32))
        angle = (2.0 * np.pi * 2.0**-32) * words[half:]
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        found = rng.standard_normal(np, n, KEY, SITE)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, both[:n].astype(np.float32))


# Slices that begin and end within a block of four words and within a vector of the processor.
@pytest.mark.parametrize(
    ("n", "pairs"),
    [
        (1, 1),
        (2, 3),
        (3, 1),
        (40, 1),
        (41, 3),
        (1000, 129),
        (4099, 129),
        (4099, 2000),
        (70_001, 9973),
    ],
)
def test_normal_numbers_drawn_in_slices_are_those_drawn_at_once(n, pairs):
    half = -(-n // 2)
    slices = [
        rng.normal_pairs(np, n, KEY, SITE, first, min(first + pairs, half))
        for first in range(0, half, pairs)
    ]
    found = np.concatenate([part for side in zip(*slices, strict=True) for part in side])
    np.testing.assert_array_equal(found[:n], rng.standard_normal(np, n, KEY, SITE))


def test_no_pairs_of_normal_numbers_are_two_empty_arrays():
    for n, at in ((0, 0), (9, 5)):
        early, late = rng.normal_pairs(np, n, KEY, SITE, at, at)
        assert early.shape == late.shape == (0,)


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (3, 2), (0, 6)])
def test_pairs_that_a_draw_does_not_have_are_refused(first, last):
    with pytest.raises(ValueError, match="not within the 5 pairs"):
        rng.normal_pairs(np, 9, KEY, SITE, first, last)


def test_normal_numbers_have_the_moments_of_a_normal():
    n = 100_001
    x = rng.standard_normal(np, n, KEY, SITE).astype(np.float64)
    assert x.shape == (n,)
    assert np.isfinite(x).all()
    # Means of x^k have standard deviation sqrt(E x^2k - (E x^k)^2) / sqrt(n).
    for power, moment, deviation in ((1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert abs((x**power).mean() - moment) < 4 * deviation / n**0.5


def test_the_two_halves_of_a_normal_draw_are_uncorrelated():
    x = rng.standard_normal(np, 100_000, KEY, SITE).astype(np.float64)
    first, second = x[:50_000], x[50_000:]
    for a, b in ((first, second), (first**2 - 1, (second**2 - 1))):
        assert abs((a * b).mean()) < 4 * a.std() * b.std() / 50_000**0.5


def require_independent(a, b):
    """Bits agree as often as coins do, and the values are uncorrelated, within 4 sigma."""
    agreeing = 32 - np.bitwise_count(a ^ b).mean()
    assert abs(agreeing - 16) < 4 * np.sqrt(8 / len(a))
    u, v = (w / 2**32 - 0.5 for w in (a, b))
    assert abs((u * v).mean()) < 4 / 12 / len(a) ** 0.5
