"""A step's rollouts: groups of completions sampled from the weights as they are, and their batch.

`Rollouts.batch(step)` is a training source like any other: what it gives is a function of the seed,
the step and the weights, and nothing is remembered, so a run that was killed in a rollout goes on
with the same bits. Trained are the ids that were sampled, never text that was encoded again.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xtrain.data.chat import ChatFormat
from xtrain.data.packing import IGNORED, Batch, permutation
from xtrain.engine.device import Device
from xtrain.engine.tensor import no_tape
from xtrain.errors import UsageError
from xtrain.infer.generate import generate
from xtrain.models.qwen3 import Qwen3
from xtrain.rl.advantages import group_advantages, is_uniform, token_weights
from xtrain.rl.config import PolicyConfig
from xtrain.tasks.rewards import rewarded
from xtrain.train.objectives.policy_gradient import token_logprob


@dataclass(frozen=True)
class Completions:
    """Sampled rows, prompt by prompt: ids with the end token if one was sampled, and rewards."""

    prompts: list[list[int]]  # one a row
    ids: list[list[int]]
    texts: list[str]
    ended: np.ndarray  # (rows,) bool
    rewards: np.ndarray  # (prompts, group) float64


class Rollouts:
    """A source of policy-gradient batches for a model that trains meanwhile.

    questions: what the user says, one a prompt. reward: (question, completion) -> float. rows: of a
    micro-batch. reference: (input_ids, targets) -> log-probabilities of the frozen model, or None.
    Raises UsageError when a prompt and a completion do not fit seq_len.
    """

    def __init__(
        self,
        model: Qwen3,
        device: Device,
        chat: ChatFormat,
        questions: Sequence[str],
        reward: Callable[[str, str], float],
        *,
        config: PolicyConfig,
        seed: int,
        rows: int,
        seq_len: int,
        reference: Callable | None = None,
    ) -> None:
        self.model, self.device, self.chat = model, device, chat
        self.questions, self.reward, self.config = list(questions), reward, config
        self.seed, self.seq_len, self.reference = seed, seq_len, reference
        self.rows = rows
        self.prompts = [chat.prompt([{"role": "user", "content": q}]) for q in self.questions]
        longest = max(map(len, self.prompts))
        if longest + config.max_new_tokens - 1 > seq_len:
            raise UsageError(
                f"train.seq_len={seq_len}: a prompt of {longest} tokens and "
                f"policy.max_new_tokens={config.max_new_tokens} do not fit"
            )
        total = config.prompts * config.group
        if total % rows:
            raise UsageError(
                f"train.batch_size={rows} does not divide the {total} rollouts of a step "
                f"(policy.prompts={config.prompts} x policy.group={config.group})"
            )
        self._made: tuple[int, Batch, dict] | None = None

    @property
    def fingerprint(self) -> str:
        """sha256 of the prompts and of all that decides how they are drawn."""
        facts = f"{self.seed} {self.config} {self.rows} {self.seq_len} {self.prompts}"
        return hashlib.sha256(facts.encode()).hexdigest()

    def epoch(self, step: int) -> float:
        """Times that the prompts have been through before a step."""
        rollouts = step // self.config.inner_steps
        return rollouts * self.config.prompts / len(self.prompts)

    def batch(self, step: int) -> Batch:
        """Arrays (A, B, T) of a step: sampled now, or by the first of its inner steps."""
        number = step // self.config.inner_steps
        if self._made is None or self._made[0] != number:
            completions = self.sample(number)
            batch = self._arrays(completions)
            self._made = (number, batch, self._describe(completions))
        return self._made[1]

    def seen(self) -> dict[str, float]:
        """What the last rollouts were like, by name."""
        return {} if self._made is None else self._made[2]

    def chosen(self, number: int) -> list[int]:
        """The prompts of a set of rollouts: every one once an epoch."""
        n, count = len(self.prompts), self.config.prompts
        places = range(number * count, (number + 1) * count)
        return [int(permutation(self.seed, 2 + place // n, n)[place % n]) for place in places]

    def sample(self, number: int) -> Completions:
        """Sample a set of rollouts; each prompt is repeated for its group."""
        chosen = self.chosen(number)
        group = self.config.group
        rows = [prompt for prompt in chosen for _ in range(group)]
        prompts = [self.prompts[i] for i in rows]
        ids = generate(
            self.model,
            prompts,
            max_new_tokens=self.config.max_new_tokens,
            temperature=self.config.temperature,
            seed=_noise_seed(self.seed, number),
            stop_id=self.chat.end,
        )
        texts = [self.chat.said(row) for row in ids]
        rewards = [
            rewarded(self.reward, self.questions[i], text)
            for i, text in zip(rows, texts, strict=True)
        ]
        ended = np.array([row[-1] == self.chat.end for row in ids])
        return Completions(prompts, ids, texts, ended, np.reshape(rewards, (len(chosen), group)))

    def _arrays(self, made: Completions) -> Batch:
        """Rows of prompt and completion, padded on the right; inputs and targets are shifted."""
        count, T, config = len(made.ids), self.seq_len, self.config
        ids, targets = np.zeros((count, T), np.int32), np.full((count, T), IGNORED, np.int32)
        lengths = np.array([len(row) for row in made.ids])
        informative = np.repeat(~is_uniform(made.rewards), config.group)
        each = token_weights(lengths, informative, config.max_new_tokens, config.algorithm)
        weights = np.zeros((count, T), np.float32)
        for row, (prompt, said) in enumerate(zip(made.prompts, made.ids, strict=True)):
            text = [*prompt, *said]
            ids[row, : len(text) - 1] = text[:-1]
            place = slice(len(prompt) - 1, len(text) - 1)
            targets[row, place] = said
            weights[row, place] = each[row, : len(said)]
        advantages = group_advantages(made.rewards, config.algorithm).reshape(-1)
        batch = {
            "input_ids": ids,
            "targets": targets,
            "advantages": advantages.astype(np.float32),
            "weights": weights,
        }
        batch = {n: a.reshape(-1, self.rows, *a.shape[1:]) for n, a in batch.items()}
        batch["old"] = self._by_micro_batch(self._logprob, batch)
        if self.reference is not None:
            batch["reference"] = self._by_micro_batch(self.reference, batch)
        return batch

    def _by_micro_batch(self, function: Callable, batch: Batch) -> np.ndarray:
        """(A, B, T) fp32, computed in the shapes of the training step: the same bits as there."""
        pairs = zip(batch["input_ids"], batch["targets"], strict=True)
        found = [self.device.host(function(*map(self.device.array, pair))) for pair in pairs]
        return np.stack(found)

    def _logprob(self, input_ids, targets):
        with no_tape():
            return token_logprob(self.model, input_ids, targets, self.config.temperature).data

    def _describe(self, made: Completions) -> dict[str, float]:
        from xtrain.tasks.arithmetic import is_well_formed

        rewards, uniform = made.rewards, is_uniform(made.rewards)
        return {
            "reward": float(rewards.mean()),
            "informative_share": float(1 - uniform.mean()),
            "pass_at_group": float((rewards > 0).any(1).mean()),
            "format_share": float(np.mean([is_well_formed(text) for text in made.texts])),
            "ended_share": float(made.ended.mean()),
            "completion_tokens": float(np.mean([len(row) for row in made.ids])),
            "distinct_share": len({*made.texts}) / len(made.texts),
        }


def _noise_seed(seed: int, number: int) -> int:
    """A seed of its own for each set of rollouts: 64 bits of a hash."""
    digest = hashlib.sha256(f"rollouts {seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little")
