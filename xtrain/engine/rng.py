"""Counter-based random numbers: Philox4x32-10, the same bits on every backend.

A number is a pure function of (seed, site, step, micro-batch, index): nothing is stored, so resume,
recomputation and graph replay agree by construction. `site` names the use (a hash of a parameter's
name, a layer's dropout, sampling), so that no two uses share a stream.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import hashlib

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def site_of(name: str) -> int:
    """A 32-bit site number from a name; stable across processes and versions."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def key_array(xp, seed: int, step: int, micro: int = 0):
    """The part of the counter that changes from step to step, as an array: uint32 (4,)."""
    return xp.asarray([seed & 0xFFFFFFFF, seed >> 32, step, micro], dtype=xp.uint32)


def philox(xp, counters: tuple, key: tuple):
    """Ten rounds of Philox4x32. counters: four uint32 arrays of one shape; key: two uint32."""
    c0, c1, c2, c3 = (c.astype(xp.uint64) for c in counters)
    k0, k1 = (k.astype(xp.uint64) for k in key)
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & low, (p0 >> shift) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(_W0)) & low, (k1 + np.uint64(_W1)) & low
    return tuple(c.astype(xp.uint32) for c in (c0, c1, c2, c3))


def bits(xp, n: int, key, site: int, *, start: int = 0):
    """Words start, ..., start + n - 1 of the stream of (key, site): uint32 (n,).

    key: as from `key_array`. Word i is word i % 4 of the block with counter (i // 4, site, step,
    micro), so any range of a stream can be drawn alone. ValueError when the range is not within
    the 2**34 words of a stream.
    """
    if not 0 <= start <= start + n <= 4 * 2**32:
        raise ValueError(f"bits: words {start} to {start + n} are not within a stream's 2**34")
    first, last = start // 4, -(-(start + n) // 4)
    index = xp.arange(first, last, dtype=xp.uint64)  # uint32 could not hold the end of the last
    # One element stands for every block: the first rounds then have less to compute.
    use = xp.zeros(1, dtype=xp.uint32) + np.uint32(site)
    words = philox(xp, (index, use, key[2:3], key[3:4]), (key[0], key[1]))
    return xp.stack(words, axis=1).reshape(-1)[start - 4 * first :][:n]


def uniform(xp, n: int, key, site: int):
    """n float32 in [0, 1) with 24 random bits each."""
    return (bits(xp, n, key, site) >> np.uint32(8)).astype(xp.float32) * np.float32(2.0**-24)


def standard_normal(xp, n: int, key, site: int):
    """n float32 standard normal numbers (Box-Muller, computed in float64)."""
    pairs = xp.concatenate(normal_pairs(xp, n, key, site, 0, -(-n // 2)))
    return pairs[:n]


def normal_pairs(xp, n: int, key, site: int, first: int, last: int):
    """Elements first, ..., last - 1 of `standard_normal(xp, n, key, site)` and their partners.

    Element i of the first half (of ceil(n / 2)) and element i of the second come from words i of
    the two halves of the stream. Returns two float32 (last - first,), bitwise the same however the
    range is cut; with an odd n the last partner of all is one number more than the draw has.
    ValueError when the range is not within the first half.
    """
    half = -(-n // 2)
    if not 0 <= first <= last <= half:
        raise ValueError(f"normal_pairs: {first} to {last} are not within the {half} pairs")
    words = bits(xp, last - first, key, site, start=first).astype(xp.float64)
    radius = xp.sqrt(-2.0 * xp.log((words + 1.0) * 2.0**-32))
    words = bits(xp, last - first, key, site, start=half + first).astype(xp.float64)
    angle = (2.0 * np.pi * 2.0**-32) * words
    return tuple((radius * part(angle)).astype(xp.float32) for part in (xp.cos, xp.sin))
