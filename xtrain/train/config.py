"""How long, on what batches and with which optimizer to train: values only."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule. The learning rate of a step is a pure function of the step."""

    lr: float  # the highest learning rate, reached at the end of the warm-up
    beta1: float = 0.9  # decay of the first moment, a step
    beta2: float = 0.95  # decay of the second moment, a step
    eps: float = 1e-8  # added after the bias-corrected root
    weight_decay: float = 0.1  # decoupled, on matrices only, times lr
    clip_norm: float = 1.0  # largest global gradient norm; 0 = no clipping
    schedule: str = "cosine"  # cosine | linear | constant, after the warm-up
    warmup_steps: int = 0  # steps of linear warm-up from 0
    min_lr_ratio: float = 0.1  # the lowest learning rate over lr


@dataclass(frozen=True)
class TrainConfig:
    """The budget, the batch and what happens every so many steps."""

    max_tokens: int  # tokens to train on; steps = max_tokens // tokens a step
    batch_size: int  # sequences in one micro-batch, B
    seq_len: int  # tokens in one sequence, T
    accumulation: int = 1  # micro-batches summed into one step, A
    dropout: float = 0.0  # probability of dropping an element, in [0, 1)
    log_every_steps: int = 10  # steps between two lines of metrics
    eval_every_steps: int = 200  # steps between two evaluations; the last step always evaluates
    eval_tokens: int = 65_536  # held-out tokens of one evaluation, always the same ones
    save_every_steps: int = 200  # steps between two checkpoints; the last step always saves
    keep_last: int = 2  # checkpoints kept besides the best
    sample_tokens: int = 64  # tokens sampled for each prompt
    prompts: list[str] = field(default_factory=list)  # what samples start from

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.accumulation * self.batch_size * self.seq_len

    @property
    def total_steps(self) -> int:
        """Whole optimizer steps in the token budget."""
        return self.max_tokens // self.tokens_per_step
