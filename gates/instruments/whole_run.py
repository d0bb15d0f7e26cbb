"""A whole run through the command in a process of its own, and the most memory that it held.

estimated, held = whole_run("cpu")      bytes; trained, evaluated, exported, measured again
with spoilt("..."): ...                 inside, the child runs these lines of Python first
"""

import tempfile
from pathlib import Path
from unittest import mock

from gates.instruments.child import last_line, run_python
from xtrain.assemble.estimate import Stages, run_memory_bytes
from xtrain.config.compose import compose, load_run

SPOILT = ""
REFUSED = 3  # the exit code of a run that ended, and was judged and refused
# v8 a sequence at a time: the state is most of it, so a second model anywhere is seen. On a CPU
# with fewer and narrower layers.
RUN = """\
# @package _global_
defaults:
  - override /model: v8
  - override /data: text
  - _self_
name: whole
data: {heldout_fraction: 0.1}
train:
  max_tokens: 384
  batch_size: 1
  seq_len: 128
  log_every_steps: 1
  eval_tokens: 256
  sample_tokens: 4
  prompts: ["The people"]
optim: {lr: 1.0e-3, warmup_steps: 1}
gate:
  requires: []
  checks:
    - {name: missing_steps, op: "==", bar: 0}
"""
SMALLER = {
    "cpu": ("model.hidden_size=512", "model.intermediate_size=1024", "model.num_hidden_layers=4"),
    "cuda": ("features.precision=bf16",),
}
TEXT = "The people of the county sent letters to the Senate about roads and harbours.\n" * 400
COMMAND = (
    "import sys",
    "from pipelines.__main__ import main",
    "from xtrain.engine import device",
    "code = main(sys.argv[1:])",
    "print(device.current().memory().peak_bytes)",
    "raise SystemExit(code)",
)


def whole_run(device: str) -> tuple[Stages, int]:
    """The estimate of a run and the bytes that it held at most: arrays on a GPU, on a CPU all of
    the process. Raises RuntimeError with the child's last line when the run does not end well."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "conf" / "run").mkdir(parents=True)
        (here / "conf" / "run" / "whole.yaml").write_text(RUN)
        (here / "text.txt").write_text(TEXT)
        overrides = ["run=whole", f"data.path={here}/text.txt", f"device={device}"]
        overrides += SMALLER[device]
        run = load_run(compose(overrides, config_dir=str(here / "conf")))
        result = run_python(
            "-c",
            "\n".join((SPOILT, *COMMAND)),
            "--config-dir",
            str(here / "conf"),
            *overrides,
            cwd=here,
            timeout_s=900,
            MLFLOW_TRACKING_URI=f"sqlite:///{here}/mlflow.db",
        )
        if result.returncode not in (0, REFUSED):  # three steps earn no promotion
            why = last_line(result.stderr)
            raise RuntimeError(f"the run ended with {result.returncode}: {why}")
        return run_memory_bytes(run, device), int(last_line(result.stdout))


def spoilt(lines: str):
    """Lines for a defect."""
    return mock.patch.dict(globals(), SPOILT=lines)
