"""Choose the next token from scores: greedy, or with temperature, top-k and top-p.

    noise = -log(-log(u)),  u uniform in (0, 1)
    id = argmax(logits / temperature + noise)  over the words that top-k and top-p keep

Adding Gumbel noise and taking the largest draws from the softmax exactly, without a sum over the
vocabulary and without the host. Noise is a pure function of (seed, step, stream, word): a row gets
the same tokens alone and in any batch. Sums and noise are float64: in fp32 u rounds to 1 once in
2**24 words, which would make its noise infinite.
Source: Gumbel-max, Maddison et al., arXiv:1411.0030; top-p, Holtzman et al., arXiv:1904.09751.
"""

import math
from dataclasses import dataclass

import numpy as np

from xtrain.engine import device, rng
from xtrain.engine.dtype import upcast
from xtrain.errors import UsageError

SITE = rng.site_of("sample")


@dataclass(frozen=True)
class Sampling:
    """How to choose. Raises UsageError naming the value that is out of range.

    temperature: divides the logits; 0 is greedy.  top_k: keep the k best words.  top_p: keep the
    best words whose probabilities reach p. Words that tie with the last one kept are kept too.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"temperature={self.temperature}: 0 (greedy) or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k={self.top_k}: a number of words, at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p}: a probability in (0, 1]")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"seed={self.seed}: an integer in [0, 2**64)")


def sample(logits, sampling: Sampling, *, step: int, streams):
    """Next ids (B,) int32 of logits (B, V).

    step: number of the token in its sequence.  streams: (B,) uint32, each row's own noise.
    """
    xp = device.current().xp
    logits = upcast(logits)
    if sampling.temperature == 0:
        return logits.argmax(-1).astype(xp.int32)
    scores = logits.astype(xp.float64) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[1]:
        scores = keep_top_k(xp, scores, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        scores = keep_top_p(xp, scores, sampling.top_p)
    key = rng.key_array(xp, sampling.seed, step)
    return (scores + gumbel(xp, scores.shape[1], key, streams)).argmax(-1).astype(xp.int32)


def keep_top_k(xp, scores, k: int):
    """Scores (B, V) with all but each row's k largest at -inf."""
    at = scores.shape[1] - k
    least = xp.partition(scores, at, axis=1)[:, at : at + 1]
    return xp.where(scores >= least, scores, -xp.inf)


def keep_top_p(xp, scores, p: float):
    """Scores (B, V) with -inf for words that are not needed to reach probability p."""
    descending = -xp.sort(-scores, axis=1)
    mass = xp.exp(descending - descending[:, :1])
    mass /= mass.sum(1, keepdims=True)
    before = xp.cumsum(mass, axis=1) - mass  # probability of all better words
    kept = xp.maximum((before < p).sum(1, keepdims=True), 1)
    least = xp.take_along_axis(descending, kept - 1, axis=1)
    return xp.where(scores >= least, scores, -xp.inf)


def gumbel(xp, words: int, key, streams):
    """Standard Gumbel noise (B, words) float64; key as from `rng.key_array`, streams (B,) uint32.

    Word v takes word v % 4 of the block with counter (v // 4, site, step, stream).
    """
    blocks = xp.arange(-(-words // 4), dtype=xp.uint32)[None, :]
    fixed = xp.asarray([SITE], dtype=xp.uint32)
    drawn = rng.philox(xp, (blocks, fixed, key[2:3], streams[:, None]), (key[0], key[1]))
    bits = xp.stack(drawn, axis=2).reshape(streams.shape[0], -1)[:, :words]
    uniform = (bits.astype(xp.float64) + 0.5) * np.float64(2.0**-32)
    return -xp.log(-xp.log(uniform))
