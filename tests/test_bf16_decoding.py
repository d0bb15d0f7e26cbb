"""A model whose matrices are bf16 is decoded and sampled like any other."""

import ml_dtypes
import numpy as np
import pytest

from xtrain.engine import device
from xtrain.engine.params import FlatBuffers
from xtrain.infer.generate import generate
from xtrain.infer.sample import Sampling, sample
from xtrain.models.config import Qwen3Config
from xtrain.models.qwen3 import Qwen3

CONFIG = Qwen3Config(
    vocab_size=53,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.3,
)
PROMPTS = [[7], [1, 2, 3, 4, 5], [11] * 12]
WAYS = [{}, {"temperature": 0.8, "top_k": 5}, {"temperature": 1.0, "top_p": 0.9}]
ON = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=ON)
def here(request):
    if request.param == "cuda":
        from xtrain.cuda.runtime import why_unusable

        if why_unusable():
            pytest.skip(why_unusable())
    yield device.use(request.param)
    device.use("cpu")


def model_of(here, precision):
    model = Qwen3(CONFIG)
    FlatBuffers(model.named_parameters(), here, precision).initialize(3, here)
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", WAYS, ids=["greedy", "top_k", "top_p"])
def test_texts_are_the_same_each_time_and_of_the_vocabulary(here, precision, how):
    model = model_of(here, precision)
    texts = [generate(model, PROMPTS, max_new_tokens=20, seed=4, **how) for _ in range(2)]
    assert texts[0] == texts[1]
    assert [len(row) for row in texts[0]] == [20, 20, 20]
    assert all(0 <= token < CONFIG.vocab_size for row in texts[0] for token in row)


def test_the_first_greedy_token_of_bf16_is_that_of_the_whole_forward(here):
    model = model_of(here, "bf16")
    ids = here.array(np.array([PROMPTS[1]], np.int32))
    scores = here.host(model.logits(model(ids)).data)[0, -1].astype(np.float32)
    assert generate(model, PROMPTS[1:2], max_new_tokens=1)[0] == [int(scores.argmax())]


def test_scores_in_bf16_are_sampled_as_their_fp32_values(here):
    scores = np.random.default_rng(0).standard_normal((4, 53)).astype(ml_dtypes.bfloat16)
    streams = here.array(np.arange(4, dtype=np.uint32))
    for how in (Sampling(), Sampling(1.0, seed=3), Sampling(0.7, top_k=9, top_p=0.8, seed=5)):
        drawn = [
            here.host(sample(here.array(each), how, step=2, streams=streams)).tolist()
            for each in (scores, scores.astype(np.float32))
        ]
        assert drawn[0] == drawn[1]
