"""This engine against stored values of torch and transformers; neither is needed to run it."""

import importlib

import numpy as np
import pytest

from gates.instruments.golden import compare
from gates.instruments.golden.reference import FOLDER, MODELS, read
from xtrain.engine import device, scalar


@pytest.fixture(scope="module")
def values():
    return compare.golden_values("cpu")


def test_loss_equals_transformers(values):
    assert values["golden_loss_rel"] <= 1e-6


def test_logits_equal_transformers(values):
    assert values["golden_logits_max_abs"] <= 1e-4


def test_every_parameter_gradient_equals_transformers(values):
    assert values["golden_worst_grad_rel_l2"] <= 1e-3


def test_losses_of_ten_adamw_steps_equal_torch(values):
    assert values["golden_ten_steps_rel"] <= 1e-5


def test_adamw_follows_torch_for_a_hundred_steps():
    assert compare.adamw_100_steps("cpu")["adamw_100_steps_rel"] <= 5e-6


def test_greedy_tokens_of_an_exported_model_equal_transformers():
    assert compare.golden_greedy("cpu") == {"golden_greedy_mismatches": 0}


def test_a_gradient_is_stored_for_every_parameter():
    for golden in MODELS:
        stored = read(golden.file)
        weights = {n.removeprefix("weight/") for n in stored if n.startswith("weight/")}
        assert weights == {n.removeprefix("grad/") for n in stored if n.startswith("grad/")}
        assert all(np.abs(stored[f"grad/{name}"]).max() > 0 for name in weights)


def test_stored_values_are_small_and_say_what_made_them():
    files = list(FOLDER.glob("*.npz"))
    assert sum(path.stat().st_size for path in files) < 300_000
    assert all("torch=" in str(read(path.name)["versions"]) for path in files)


@pytest.fixture
def reference_only():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XTRAIN_KERNELS", "reference")
        yield
    device.use("cpu")  # the one that was used read the setting when it was made


def test_a_wrong_order_of_grouped_heads_is_seen(monkeypatch, reference_only):
    def interleaved(x, kv_heads):
        B, H, T, Dh = x.shape
        return x.reshape(B, H // kv_heads, kv_heads, T, Dh).swapaxes(1, 2)

    attention = importlib.import_module("xtrain.engine.ops.attention")  # not the op of that name
    monkeypatch.setattr(attention, "grouped", interleaved)
    assert compare.golden_model_values(MODELS[0], "cpu")["golden_logits_max_abs"] > 1e-2


def test_an_epsilon_inside_the_root_is_seen(monkeypatch, reference_only):
    def misplaced(p, m, root_v, shrink, step_size, sqrt_bias2, eps):
        return p * shrink - step_size * (m / ((root_v + eps) / sqrt_bias2))

    monkeypatch.setattr(scalar, "adamw_weight", misplaced)
    assert compare.adamw_100_steps("cpu")["adamw_100_steps_rel"] > 1e-3
