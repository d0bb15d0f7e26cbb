"""phase=decode and phase=eval, on a run that was trained, judged and promoted in seconds."""

import io
import json
from pathlib import Path

import pytest

from gates.instruments.golden.compare import imported
from pipelines import decode
from pipelines.__main__ import _literal_prompt, main
from xtrain.assemble.origin import adopt, find_origin
from xtrain.config.compose import compose, load_run
from xtrain.data.tokenizers.gpt2 import load_gpt2
from xtrain.errors import UsageError
from xtrain.infer.generate import generate

RUN = """\
# @package _global_
name: tiny
model: {hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
        num_key_value_heads: 1, head_dim: 8, max_position_embeddings: 64}
data: {max_bytes: 100_000}
train: {max_tokens: 1280, batch_size: 4, seq_len: 32, eval_tokens: 512, sample_tokens: 4}
optim: {lr: 0.03}
features: {precision: fp32}
gate:
  checks:
  - {name: missing_steps, op: "==", bar: 0}
  - {name: val_loss, op: "<=", bar: 11}
"""
GREEDY = ["decode.temperature=0", "decode.max_new_tokens=7"]
PROMPT = "The people of the [United] States, and"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory in which the run `tiny` was promoted."""
    place = tmp_path_factory.mktemp("place")
    (place / "own" / "run").mkdir(parents=True)
    (place / "own" / "run" / "tiny.yaml").write_text(RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        assert main([*OURS, "device=cpu"]) == 0
    return place


OURS = ["--config-dir", "own", "run=tiny", "device=cpu"]


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (trained,) = Path("outputs/tiny/pretrain").iterdir()
    return trained


def say(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def greedy(directory, prompt, tokens=7):
    """The continuation by `generate`, of the model that was exported."""
    model, _ = imported(directory, "cpu")
    tokenizer = load_gpt2()
    ids = tokenizer.encode_ordinary(prompt) or [tokenizer.eot]
    found = generate(model, [ids], max_new_tokens=tokens, stop_id=tokenizer.eot)[0]
    return tokenizer.decode([i for i in found if i != tokenizer.eot])


def test_the_promoted_model_continues_a_prompt_on_stdout(here, capsys):
    assert main([*OURS, "phase=decode", f"prompt={PROMPT}", *GREEDY]) == 0
    shown = capsys.readouterr()
    assert shown.out == greedy(here / "export", PROMPT) + "\n"
    assert "model " in shown.err and PROMPT not in shown.out


@pytest.mark.parametrize("of", ["export", "", "checkpoints/10"])
def test_an_export_a_run_and_a_checkpoint_continue_alike(here, capsys, of):
    origin = f"init_from={here / of}"
    assert main([*OURS, "phase=decode", origin, f"prompt={PROMPT}", *GREEDY]) == 0
    assert capsys.readouterr().out == greedy(here / "export", PROMPT) + "\n"


def test_the_shape_comes_with_the_weights_whatever_the_run(here, capsys):
    origin = f"init_from={here / 'export'}"
    assert main(["run=v9", "device=cpu", "phase=decode", origin, "prompt=Hello", *GREEDY]) == 0
    assert capsys.readouterr().out == greedy(here / "export", "Hello") + "\n"


def test_without_a_prompt_every_line_of_stdin_is_one_and_an_empty_one_starts_a_text(
    here, capsys, monkeypatch
):
    say(monkeypatch, "One\n\nthree")
    assert main([*OURS, "phase=decode", *GREEDY]) == 0
    wanted = [greedy(here / "export", prompt) + "\n" for prompt in ("One", "", "three")]
    assert capsys.readouterr().out == "".join(wanted)


def test_a_terminal_is_asked_line_by_line_and_asked_again_after_a_prompt_too_long(
    here, capsys, monkeypatch
):
    say(monkeypatch, f"One\n{'many words ' * 100}\nTwo\n")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main([*OURS, "phase=decode", *GREEDY]) == 0
    shown = capsys.readouterr()
    assert shown.out == "".join(greedy(here / "export", p) + "\n" for p in ("One", "Two"))
    assert shown.err.count("prompt> ") == 4 and "64 positions" in shown.err


def test_the_same_seed_gives_the_same_text_and_another_one_another(here, capsys):
    texts = []
    for seed in (1, 1, 2):
        assert main([*OURS, "phase=decode", f"prompt={PROMPT}", f"seed={seed}"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_decoding_writes_nothing(here, place, capsys):
    before = sorted(place.rglob("*"))
    assert main([*OURS, "phase=decode", "prompt=Hello", *GREEDY]) == 0
    assert sorted(p for p in place.rglob("*") if "mlflow.db" not in p.name) == [
        p for p in before if "mlflow.db" not in p.name
    ]


@pytest.mark.parametrize("phase", ["decode", "eval"])
def test_without_a_promoted_model_one_line_names_the_command_and_nothing_is_written(
    phase, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main(["run=v3", f"phase={phase}", "device=cpu"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "`xtrain run=v3`" in error
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_never_promoted_is_refused_beside_one_that_was(here, capsys):
    assert main(["run=v3", "phase=decode", "device=cpu", "prompt=a"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "xtrain-v3" in error and "`xtrain run=v3`" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["init_from=nowhere"], "init_from=nowhere: no such directory"),
        (["init_from=own"], "no config.json"),
        (["decode.temperature=-1"], "decode.temperature=-1.0 is below 0"),
        (["decode.top_p=1.5"], "decode.top_p=1.5"),
        (["decode.top_k=0"], "decode.top_k=0"),
        (["decode.max_new_tokens=0"], "decode.max_new_tokens=0"),
        ([f"prompt={'many words ' * 100}"], "64 positions"),
    ],
)
def test_what_cannot_be_decoded_is_refused_in_one_line(here, capsys, arguments, said):
    assert main([*OURS, "phase=decode", "prompt=a", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.splitlines()[-1].startswith("xtrain: ")


@pytest.mark.parametrize(
    "text",
    [
        "a, b",
        "null",
        "",
        "it's [this] {x: 1}?",
        "${seed} \\${a} \\",
        "'quoted'",
        "two\nlines",
        "a=b",
    ],
)
def test_a_prompt_is_the_text_that_was_typed(text):
    assert load_run(compose([_literal_prompt(f"prompt={text}")])).prompt == text


def test_a_character_of_several_tokens_comes_out_whole():
    tokenizer = load_gpt2()
    text = "na\u00efve \u6f22\u5b57 \U0001f642 end\n\nnext \U0001f642"
    pieces = list(decode.pieces(tokenizer, tokenizer.encode_ordinary(text)))
    assert "".join(pieces) == text
    assert len(pieces) > 5 and not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_character_come_out_at_the_end():
    tokenizer = load_gpt2()
    (first, *_) = tokenizer.encode_ordinary("\U0001f642")
    assert "".join(decode.pieces(tokenizer, [64, first])) == "a\ufffd"


def test_a_text_ends_before_the_id_that_ends_it():
    assert list(decode.until({3, 9}, iter([1, 2, 9, 4]))) == [1, 2]


def test_a_model_key_that_contradicts_the_weights_is_refused(here):
    origin = find_origin(str(here / "export"))
    run = load_run(compose(["run=v0", "model.hidden_size=64"]))
    with pytest.raises(UsageError, match=r"hidden_size is 16, model\.hidden_size is 64"):
        adopt(run, origin, ["model.hidden_size=64"])
    assert adopt(run, origin).model.hidden_size == 16


def test_training_from_a_checkpoint_of_another_shape_is_refused(here, capsys):
    arguments = ["run=v0", "device=cpu", f"init_from={here}"]
    assert main(arguments) == 2
    assert "its hidden_size is 16, model.hidden_size is 32" in capsys.readouterr().err


def test_a_dry_run_describes_the_model_of_the_weights(here, capsys):
    assert main(["run=v0", f"init_from={here / 'export'}", "dry_run=true"]) == 0
    assert "1 layers of 16" in capsys.readouterr().out


# phase=eval

SMALL = ["eval.name=small", "eval.tokens=1000", "eval.sha256=null"]


def evaluated(capsys, *arguments):
    """The content of the eval.json that a command wrote, and its path."""
    assert main([*OURS, "phase=eval", *SMALL, *arguments]) == 0
    shown = capsys.readouterr()
    path = Path(shown.err.split("wrote ")[1].splitlines()[0])
    return json.loads(path.read_text()), path, shown.out


def test_an_evaluation_writes_what_it_measured_and_on_which_set(here, capsys):
    result, path, table = evaluated(capsys)
    assert path.parent.parent == Path("outputs/tiny/eval").absolute()
    assert result["tokens"] == result["set"]["tokens"] == 1000
    assert result["set"]["sha256"][:12] in table
    bits = result["loss"] / 0.6931471805599453 * 1000 / result["set"]["bytes"]
    assert result["bits_per_byte"] == pytest.approx(bits)
    assert 5 < result["loss"] < 12 and 0 < result["standard_error"] < 0.3
    assert json.loads((path.parent / "manifest.json").read_text())["status"] == "FINISHED"


def test_a_run_its_checkpoint_and_its_export_have_the_same_loss(here, capsys):
    results = [
        evaluated(capsys, f"init_from={here / of}")[0] for of in ("", "checkpoints/10", "export")
    ]
    assert len({result["loss"] for result in results}) == 1
    assert results[0]["model"]["weights_sha256"] == results[1]["model"]["weights_sha256"]


def test_a_result_is_compared_with_one_of_the_same_set(here, capsys):
    _, path, _ = evaluated(capsys)
    for of in (path, path.parent):
        _, _, table = evaluated(capsys, f"eval.against={of}")
        assert "difference +0.0000 nats a token" in table


def test_a_result_of_another_set_is_refused_with_both_fingerprints(here, capsys):
    first, path, _ = evaluated(capsys)
    count = len(list(Path("outputs/tiny/eval").iterdir()))
    other = ["eval.name=other", "eval.tokens=900"]
    assert main([*OURS, "phase=eval", *SMALL, *other, f"eval.against={path}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert first["set"]["sha256"] in error and "other" in error
    assert len(list(Path("outputs/tiny/eval").iterdir())) == count


def test_what_is_no_result_is_refused(here, capsys):
    assert main([*OURS, "phase=eval", "eval.against=own"]) == 2
    assert "eval.against=own: not a result of phase=eval" in capsys.readouterr().err


def test_a_model_whose_data_were_cut_otherwise_is_said_to_have_seen_the_set(here, capsys):
    config = here / "config.yaml"
    before = config.read_text()
    try:
        evaluated(capsys, f"init_from={here}")
        config.write_text(before.replace("order_seed: 0", "order_seed: 1", 1))
        assert main([*OURS, "phase=eval", *SMALL, f"init_from={here}"]) == 0
    finally:
        config.write_text(before)
    assert "may have been trained on parts of small" in capsys.readouterr().err
