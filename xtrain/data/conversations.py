"""Conversations packed into rows: several to a row, none split, none seeing another.

A row holds conversations one behind the other; `starts` says where that of each position begins, so
attention and positions begin anew there. Targets that are not learned are -100. They are packed
once, in an order drawn from the seed; an epoch is a permutation of the rows, so a batch is a pure
function of (seed, step).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from xtrain.data.chat import Rendered
from xtrain.data.packing import IGNORED, Batch, permutation
from xtrain.errors import UsageError


class PackedConversations:
    """A training source of whole conversations: int32 "input_ids", "targets", "starts" (A, B, T).

    Raises UsageError when one does not fit a row, or when nothing or everything would be learned.
    """

    def __init__(
        self,
        conversations: Sequence[Rendered],
        *,
        seed: int,
        batch_size: int,
        seq_len: int,
        accumulation: int = 1,
    ) -> None:
        _check_mask(conversations)
        longest = max(len(each.ids) for each in conversations)
        if longest - 1 > seq_len:
            raise UsageError(
                f"train.seq_len={seq_len}: the longest conversation has {longest} tokens"
            )
        self._rows = _pack(conversations, seq_len, permutation(seed, 0, len(conversations)))
        self._seed, self._shape = seed, (accumulation, batch_size, seq_len)
        self.rows = len(self._rows["targets"])
        facts = hashlib.sha256(f"{seed} {self._shape}".encode())
        for name in sorted(self._rows):
            facts.update(self._rows[name].tobytes())
        self.fingerprint = facts.hexdigest()

    def batch(self, step: int) -> Batch:
        """The rows of a step."""
        per_step = self._shape[0] * self._shape[1]
        numbers = range(step * per_step, (step + 1) * per_step)
        chosen = [
            int(permutation(self._seed, 1 + n // self.rows, self.rows)[n % self.rows])
            for n in numbers
        ]
        return {name: rows[chosen].reshape(self._shape) for name, rows in self._rows.items()}

    def epoch(self, step: int) -> float:
        """Epochs done before a step."""
        return step * self._shape[0] * self._shape[1] / self.rows


def _check_mask(conversations: Sequence[Rendered]) -> None:
    """A mask of all ones or all zeros trains without an error, and trains the wrong thing."""
    learned = sum(sum(each.learned) for each in conversations)
    total = sum(len(each.learned) for each in conversations)
    if learned == 0 or learned == total:
        share = "no token" if learned == 0 else "every token"
        raise UsageError(f"{share} of the conversations would be learned: the mask is wrong")


def _pack(conversations: Sequence[Rendered], seq_len: int, order) -> Batch:
    """Rows of whole conversations, each put where the one before it ended while there is room."""
    ids, targets, starts = [], [], []
    at = seq_len  # full: the first conversation opens a row
    for number in order:
        each = conversations[int(number)]
        size = len(each.ids) - 1
        if at + size > seq_len:
            ids.append(np.zeros(seq_len, np.int32))
            targets.append(np.full(seq_len, IGNORED, np.int32))
            starts.append(np.arange(seq_len, dtype=np.int32))  # padding is alone
            at = 0
        place = slice(at, at + size)
        ids[-1][place] = each.ids[:-1]
        follows, learned = np.array(each.ids[1:], np.int32), np.array(each.learned[1:])
        targets[-1][place] = np.where(learned, follows, IGNORED)
        starts[-1][place] = at
        at += size
    stacked = {"input_ids": ids, "targets": targets, "starts": starts}
    return {name: np.stack(rows) for name, rows in stacked.items()}
