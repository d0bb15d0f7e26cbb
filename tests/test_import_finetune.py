"""A Qwen3 directory that transformers wrote: imported, decoded, fine-tuned, exported, loaded again.

    python tests/test_import_finetune.py --full

does the same with 16 heads of 128 over 8, 1024 wide, and Qwen3's vocabulary of 151,936 words.
"""

import json
import logging
import os
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest

from pipelines.__main__ import main
from xtrain.assemble.learner import training_windows
from xtrain.assemble.origin import find_origin, start_from
from xtrain.config.compose import load_saved
from xtrain.data.dataset import prepare
from xtrain.train.optimizer import learning_rate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WORDS = "Sentence {n}: the quick brown fox {m} jumps over {n} lazy dogs. "
TEXT = [WORDS.format(n=n, m=n * n) * 3 for n in range(60)]
STEPS, ROWS, T = 20, 2, 16
PROMPT = "Sentence 7: the quick"
RUN = """\
# @package _global_
# A run for a model from elsewhere: its shape and tokenizer come with init_from.
name: finetune
train: {{max_tokens: {tokens}, batch_size: {rows}, seq_len: {T}, eval_tokens: 64,
        log_every_steps: 1, eval_every_steps: 1000, save_every_steps: 1000, sample_tokens: 0}}
optim: {{lr: 3.0e-4, warmup_steps: 3}}
features: {{precision: fp32}}
gate:
  checks:
  - {{name: missing_steps, op: "==", bar: 0}}
  - {{name: val_loss, op: "<=", bar: 11}}
"""


@dataclass(frozen=True)
class Size:
    """Of the model made here; words: of the vocabulary, more than the tokenizer has."""

    words: int = 600
    width: int = 64
    ffn: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    shard: str = "700KB"


FULL = Size(151_936, 1024, 3072, 2, 16, 8, "500MB")


def write_model(directory: Path, size: Size):
    """A tied model with heads of 128 in two shards, with a tokenizer of its own; the model."""
    torch.manual_seed(0)
    shape = transformers.Qwen3Config(
        vocab_size=size.words,
        hidden_size=size.width,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=128,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=0,
        initializer_range=0.06,
        attn_implementation="eager",
    )
    model = transformers.Qwen3ForCausalLM(shape).float()
    model.save_pretrained(directory, max_shard_size=size.shard)
    write_tokenizer(directory)
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    assert len(shards) == 2, shards
    return model


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE of its own, whose end of text is id 0."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=letters,
        show_progress=False,
    )
    made.train_from_iterator(TEXT, trainer)
    made.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write_inputs(place: Path) -> None:
    (place / "texts").mkdir()
    rows = (json.dumps({"text": text}) for text in [*TEXT, "It says <|endoftext|> here. " * 5])
    (place / "texts" / "all.jsonl").write_text("\n".join(rows))
    (place / "own" / "run").mkdir(parents=True)
    run = RUN.format(tokens=STEPS * ROWS * T, rows=ROWS, T=T)
    (place / "own" / "run" / "finetune.yaml").write_text(run)


ARGUMENTS = [
    *("--config-dir", "own", "run=finetune", "device=cpu", "init_from=theirs"),
    *("data=text", "data.path=texts"),
]


def fine_tune() -> Path:
    """Run the command in the working directory; the run directory."""
    assert main(ARGUMENTS) == 0
    (trained,) = Path("outputs/finetune/pretrain").iterdir()
    return trained


def losses_of(trained: Path) -> list[float]:
    records = map(json.loads, (trained / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


def losses_of_torch(model, trained: Path) -> list[float]:
    """transformers' model and torch's AdamW on the same batches, in fp32."""
    run = load_saved(trained / "config.yaml")
    windows = training_windows(run, prepare(run.data, cache_dir="outputs/data"))
    parameters = list(model.parameters())
    groups = [
        {
            "params": [p for p in parameters if (p.ndim == 2) == decayed],
            "weight_decay": run.optim.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    o = run.optim
    optimizer = torch.optim.AdamW(groups, betas=(o.beta1, o.beta2), eps=o.eps)
    losses = []
    for step in range(STEPS):
        batch = {n: torch.tensor(a[0].astype(np.int64)) for n, a in windows.batch(step).items()}
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(o, step, STEPS)
        optimizer.zero_grad()
        logits = model(batch["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, o.clip_norm)
        optimizer.step()
    return losses


def load_watched(directory: Path):
    """(model, tokenizer, every warning that loading gave) by transformers."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    log = logging.getLogger("transformers")
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                directory, attn_implementation="eager", dtype="float32"
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    finally:
        log.removeHandler(handler)
    said = [r.getMessage() for r in records] + [str(w.message) for w in caught]
    return model.eval(), tokenizer, said


def greedy(model, tokenizer, new_tokens: int) -> str:
    """What transformers' generate makes of the prompt, up to an end of text."""
    ids = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )[0, ids.shape[1] :].tolist()
    return tokenizer.decode(out[: out.index(0)] if 0 in out else out)


def decoded(capsys, origin: str) -> str:
    given = [f"init_from={origin}", f"prompt={PROMPT}", "decode.temperature=0"]
    assert main(["phase=decode", "device=cpu", *given, "decode.max_new_tokens=64"]) == 0
    return capsys.readouterr().out.removesuffix("\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with the model `theirs`, texts, and the run that fine-tuned it."""
    place = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        model = write_model(place / "theirs", Size())
        write_inputs(place)
        return place, model, fine_tune()


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place[0])
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return place[0] / place[2]


def test_the_imported_model_decodes_the_same_64_greedy_tokens(here, capsys):
    model, tokenizer, _ = load_watched(Path("theirs"))
    wanted = greedy(model, tokenizer, 64)
    assert decoded(capsys, "theirs") == wanted and len(wanted) > 64


def test_twenty_steps_have_the_losses_of_transformers_and_torch(here, place):
    ours, truth = losses_of(here), losses_of_torch(place[1], here)
    assert len(ours) == STEPS and truth[-1] < truth[0] - 0.1
    assert max(abs(a - b) / b for a, b in zip(ours, truth, strict=True)) <= 1e-4


def test_the_fine_tuned_model_is_exported_with_its_own_tokenizer_and_loads_without_a_warning(
    here, capsys
):
    model, tokenizer, said = load_watched(here / "export")
    assert said == []
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert tokenizer("a b", add_special_tokens=False) == load_watched(Path("theirs"))[1](
        "a b", add_special_tokens=False
    )
    assert decoded(capsys, str(here / "export")) == greedy(model, tokenizer, 64)
    assert decoded(capsys, str(here)) == greedy(model, tokenizer, 64)


def test_the_run_records_the_shape_and_the_tokenizer_that_came_with_the_weights(here):
    run = load_saved(here / "config.yaml")
    assert run.model == find_origin("theirs").model
    assert run.model.head_dim == 128 and run.model.tie_word_embeddings
    assert run.data.tokenizer == str(Path("theirs").absolute())
    assert "tokenizer" in asdict(run)["data"]


def test_an_end_of_text_in_a_document_is_ordinary_text_and_between_documents_the_id(here):
    run = load_saved(here / "config.yaml")
    prepared = prepare(run.data, cache_dir="outputs/data")
    tokens = np.concatenate([prepared.train.tokens, prepared.heldout.tokens])
    assert int((tokens == 0).sum()) == len(TEXT) + 1


def test_the_promoted_model_is_evaluated_on_a_set_in_its_own_tokens(here, capsys):
    arguments = [*ARGUMENTS[:4], "phase=eval", "eval.tokens=500", "eval.sha256=null"]
    assert main([*arguments, "train.seq_len=64"]) == 0
    shown = capsys.readouterr()
    assert "models:/xtrain-finetune@promoted" in shown.out and "sotu_v1" in shown.out


def test_a_directory_without_a_tokenizer_is_refused(here, tmp_path, capsys):
    for path in Path("theirs").iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).symlink_to(path.absolute())
    assert main(["phase=decode", "device=cpu", f"init_from={tmp_path}", "prompt=a"]) == 2
    assert "no tokenizer.json" in capsys.readouterr().err


def test_a_tokenizer_of_more_words_than_the_model_is_refused(here, capsys):
    arguments = ["run=v0", "device=cpu", "data.tokenizer=theirs", "model.vocab_size=300"]
    assert main(arguments) == 2
    assert "model.vocab_size=300: the tokenizer makes 400 ids" in capsys.readouterr().err


def test_a_directory_of_another_kind_of_head_is_refused_where_the_run_has_none(here, capsys):
    assert main([*ARGUMENTS, "features.qk_norm=false"]) == 2
    assert "features.qk_norm=false" in capsys.readouterr().err


def full(size: Size = FULL) -> None:
    """The same at full size; prints what it compared."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        model = write_model(Path("theirs"), size)
        write_inputs(Path(folder))
        trained = fine_tune()
        ours, truth = losses_of(trained), losses_of_torch(model, trained)
        worst = max(abs(a - b) / b for a, b in zip(ours, truth, strict=True))
        print(f"{STEPS} steps: losses {ours[0]:.6f} to {ours[-1]:.6f}, worst relative {worst:.2e}")
        _, tokenizer, said = load_watched(trained / "export")
        print(f"warnings of loading the export: {said}")
        run, origin = start_from(load_saved(trained / "config.yaml"), [])
        print(f"imported {run.model} from {origin.path}")
        from pipelines.decode import pieces, trained_learner
        from xtrain.data.tokenizers.imported import load_tokenizer
        from xtrain.infer.generate import stream

        wanted = greedy(load_watched(Path("theirs"))[0], tokenizer, 64)
        own = load_tokenizer("theirs")
        tokens = stream(
            trained_learner(run, origin).model, own.encode_ordinary(PROMPT), max_new_tokens=64
        )
        same = "".join(pieces(own, tokens)) == wanted
        print(f"64 greedy tokens are the same: {same}")
        assert same and worst <= 1e-4 and not said


if __name__ == "__main__":
    assert sys.argv[1:] == ["--full"], "python tests/test_import_finetune.py --full"
    full()
