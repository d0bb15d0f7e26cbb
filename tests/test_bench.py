"""The benchmark command: its answers to bad calls, its report, and that the peer does our work."""

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.__main__ import main
from xtrain.assemble.sized_step import SizedStep, Work, random_batch
from xtrain.assemble.timing import Contender, interleave, paired_ratio
from xtrain.engine import device as devices
from xtrain.models.config import Qwen3Config

TINY = Qwen3Config(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=16,
    vocab_size=101,
)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["cpu_trian"], "cpu_train"),
        (["cpu_train", "--model", "v99"], "v0"),
        (["cpu_train", "--batch", "0"], "--batch"),
        (["ops", "--op", "nothing"], "attention"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(arguments, named, capsys):
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and named in errors


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from benchmarks.__main__ import parse\n"
        "try: parse(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'numpy', 'numba', 'torch', 'cupy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_report_has_the_agreed_keys(capsys):
    call = "cpu_train --batch 1 --seq 8 --rounds 1 --steps 1 --json"
    assert main(call.split()) == 0
    (result,) = json.loads(capsys.readouterr().out)
    agreed = "name work device unit ours floor peer ratio rounds versions"
    assert set(agreed.split()) <= set(result)
    assert result["unit"] == "tok/s" and result["ours"] > 0 and result["peer"] is None


def test_turns_alternate_and_the_ratio_is_of_pairs():
    turns = []
    ours, peer = (Contender(lambda n=n: turns.append(n), lambda: None) for n in ("ours", "peer"))
    times = interleave({"ours": ours, "peer": peer}, rounds=2)
    assert turns == ["ours", "peer", *["ours"] * 2, *["peer"] * 4, *["ours"] * 2]
    assert {name: len(taken) for name, taken in times.items()} == {"ours": 2, "peer": 2}
    assert paired_ratio([3.0, 4.0, 4.0], [1.0, 2.0, 4.0]) == 2.0


def test_the_peer_computes_the_same_loss_from_the_same_weights():
    torch = pytest.importorskip("torch")
    from peers.torch_model import make_step

    ours = SizedStep(TINY, Work("tiny", batch=2, seq=12), devices.use("cpu"))
    batch = random_batch(TINY, Work("tiny", batch=2, seq=12))
    peer = make_step(
        TINY,
        batch["input_ids"],
        batch["targets"],
        device="cpu",
        bf16=False,
        mode="eager",
        words=TINY.vocab_size,
        learning_rate=3e-4,
    )
    with torch.no_grad():
        for name, parameter in peer.run.named_parameters():
            parameter.copy_(torch.from_numpy(our_weight(ours, name)))
    np.testing.assert_allclose(ours.loss(), float(peer()), rtol=1e-6)
    np.testing.assert_allclose(ours.loss(), float(peer()), rtol=1e-5)  # after one update


def our_weight(ours: SizedStep, name: str) -> np.ndarray:
    for part in ("q_norm", "k_norm", "qkv_proj", "o_proj"):
        name = name.replace(f".{part}", f".self_attn.{part}")
    for part in ("gate_up_proj", "down_proj"):
        name = name.replace(f".{part}", f".mlp.{part}")
    parameter = ours.buffers.parameters[name]
    return parameter.data[: parameter.rows].copy()
