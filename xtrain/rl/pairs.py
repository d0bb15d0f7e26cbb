"""Pairs of completions of which the first is the better one, as batches of rows.

Rows come chosen, rejected, chosen, ..., one conversation each, padded on the right. A batch is a
pure function of (seed, step); a pair is never cut in two.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from xtrain.data.chat import Rendered
from xtrain.data.packing import IGNORED, Batch, permutation
from xtrain.errors import UsageError

Pair = tuple[Rendered, Rendered]


class PreferencePairs:
    """A source of "input_ids", "targets" (A, B, T) int32, "reference" (A, B), "scale" (A,) fp32.

    reference: (2 pairs,) fp32 log-probabilities of the rows by the frozen model, set once. Raises
    UsageError for a pair that does not fit, says the same twice, or an odd batch size.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        *,
        seed: int,
        batch_size: int,
        seq_len: int,
        accumulation: int = 1,
    ) -> None:
        if batch_size % 2:
            raise UsageError(f"train.batch_size={batch_size} is odd: rows come in pairs")
        rows = [row for pair in pairs for row in pair]
        longest = max(len(row.ids) for row in rows)
        if longest - 1 > seq_len:
            raise UsageError(f"train.seq_len={seq_len}: the longest row has {longest} tokens")
        for number, (chosen, rejected) in enumerate(pairs, start=1):
            if chosen.ids == rejected.ids:
                raise UsageError(f"pair {number}: what is chosen is what is rejected")
        self.count = len(rows)
        self.reference: np.ndarray | None = None
        self._seed, self._shape = seed, (accumulation, batch_size, seq_len)
        self._ids = np.zeros((self.count, seq_len), np.int32)
        self._targets = np.full((self.count, seq_len), IGNORED, np.int32)
        for number, row in enumerate(rows):
            size = len(row.ids) - 1
            self._ids[number, :size] = row.ids[:-1]
            follows = np.array(row.ids[1:], np.int32)
            self._targets[number, :size] = np.where(row.learned[1:], follows, IGNORED)
        facts = hashlib.sha256(f"{seed} {self._shape}".encode())
        facts.update(self._ids.tobytes())
        facts.update(self._targets.tobytes())
        self.fingerprint = facts.hexdigest()

    @property
    def pairs_per_step(self) -> int:
        return self._shape[0] * self._shape[1] // 2

    def batch(self, step: int) -> Batch:
        """The pairs of a step."""
        A, B, T = self._shape
        pairs = self.count // 2
        numbers = range(step * self.pairs_per_step, (step + 1) * self.pairs_per_step)
        chosen = [int(permutation(self._seed, n // pairs, pairs)[n % pairs]) for n in numbers]
        rows = np.array([[2 * n, 2 * n + 1] for n in chosen]).reshape(-1)
        return {
            "input_ids": self._ids[rows].reshape(A, B, T),
            "targets": self._targets[rows].reshape(A, B, T),
            "reference": self.reference[rows].reshape(A, B),
            "scale": np.full(A, 1 / self.pairs_per_step, np.float32),
        }

    def epoch(self, step: int) -> float:
        """Epochs done before a step."""
        return step * self.pairs_per_step / (self.count // 2)

    def every_row(self) -> Iterator[Batch]:
        """All rows in order, in the shape of a micro-batch; the last is filled up with row 0."""
        B = self._shape[1]
        for start in range(0, self.count, B):
            rows = [n if n < self.count else 0 for n in range(start, start + B)]
            yield {"input_ids": self._ids[rows], "targets": self._targets[rows]}
