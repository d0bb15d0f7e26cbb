"""What `xtrain --help` prints: the commands, the choices and the keys that people change."""

import textwrap

from xtrain.config.files import choices

_HEAD = """\
xtrain trains Qwen3-style language models, judges them, and promotes them or says why not.

  xtrain [run=NAME] [phase=NAME] [key=value ...]   train, evaluate, judge, promote; run=v0 by itself
  xtrain run=NAME phase=decode prompt="TEXT"       what the promoted model makes of a text
  xtrain run=NAME phase=eval eval=NAME             its loss and bits per byte on a fixed set
  xtrain-gate NAME ... | all                       measure and judge again
  xtrain-report                                    the evolution of all runs, with plots
  xtrain-prune [--delete]                          give back the disk of old runs' checkpoints
  xtrain-bench [NAME] [--peer]                     speed against the hardware and against PyTorch

Choices
"""

_TAIL = """
Keys (all of them: xtrain --cfg job)
  device=auto|cpu|cuda      where to train
  seed=0                    of weights, data order and dropout
  train.max_tokens=N        tokens to train on; batch_size, seq_len, accumulation beside it
  optim.lr=X                highest learning rate; warmup_steps, schedule, clip_norm beside it
  data=text data.path=PATH  your own .txt, .jsonl or .parquet, a file or a directory
  features.KEY=VALUE        one engine feature: gemm, capture, precision, remat, attention, ...
  resume=auto|none|PATH     auto goes on with this run's last complete checkpoint
  init_from=PATH            weights to start from: checkpoint, run, models:/NAME@ALIAS, or Hugging
                            Face Qwen3, which brings its own shape and tokenizer
  prompt=TEXT               phase=decode: the text to continue; without it each line of stdin
  decode.temperature=X      0 is greedy; max_new_tokens, top_k, top_p beside it
  eval.against=PATH         phase=eval: an earlier eval.json of the same set, to compare with
  promote=true|false        whether a pass moves the alias `promoted`
  dry_run=true              parameters, memory, FLOPs and time, then stop
  out=outputs               root of everything that is written

Options
  -m, --multirun            one run after the other: xtrain -m run=v0 seed=0,1,2
  --cfg job [--resolve]     the composed configuration instead of a run
  --config-dir DIR          more runs, models and data of your own: DIR/run/mine.yaml
  --info                    how the configuration came about; --hydra-help for the rest
  -sc install=bash          completion: eval "$(xtrain -sc install=bash)"

Exit codes
  0 done and promoted   1 internal error   2 usage, one line says what to do
  3 a gate refused promotion   128 + n interrupted by signal n, checkpoint kept
"""


def help_text(config_dir: str | None = None) -> str:
    """The page, with the choices of our conf/ and of a further directory."""
    extra = [config_dir] if config_dir else []
    lines = []
    for group in ("run", "phase", "data", "model", "eval"):
        names = " ".join(choices(group, *extra))
        lines += textwrap.wrap(names, 98, initial_indent=f"  {group:<7}", subsequent_indent=" " * 9)
    return _HEAD + "\n".join(lines) + "\n" + _TAIL
