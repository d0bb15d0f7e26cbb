"""Conversations as tokens: the mask, the template, packing without leakage, refusals."""

import json

import numpy as np
import pytest
from byte_model import MODEL

from xtrain.data.chat import TEMPLATE, ChatFormat, Rendered, check_messages, read_conversations
from xtrain.data.conversations import PackedConversations
from xtrain.data.packing import IGNORED
from xtrain.data.tokenizers.bytes import TURN_END, ByteTokenizer, write_byte_tokenizer
from xtrain.data.tokenizers.gpt2 import load_gpt2
from xtrain.data.tokenizers.hf_files import write_hf_tokenizer
from xtrain.data.tokenizers.imported import load_tokenizer
from xtrain.engine import device as devices
from xtrain.errors import UsageError
from xtrain.train.config import OptimConfig
from xtrain.train.learner import make_learner

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " 12 + 7 = ?\n"},
    {"role": "assistant", "content": r"\boxed{19}"},
    {"role": "user", "content": "and 2 x 3?"},
    {"role": "assistant", "content": "It is 6.\nReally."},
]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), load_gpt2()], ids=["bytes", "gpt2"])
def test_learned_are_what_the_assistant_says_and_the_end_of_its_turn(tokenizer):
    chat = ChatFormat(tokenizer)
    talk = chat.render(TALK)
    learned = [i for i, on in zip(talk.ids, talk.learned, strict=True) if on]
    said = [*tokenizer.encode_ordinary(r"\boxed{19}"), chat.end]
    said += [*tokenizer.encode_ordinary("It is 6.\nReally."), chat.end]
    assert learned == said


def test_a_prompt_is_what_comes_before_the_answer():
    chat = ChatFormat(ByteTokenizer())
    prompt, whole = chat.prompt(TALK[:2]), chat.render(TALK[:3])
    assert whole.ids[: len(prompt)] == prompt
    assert not any(whole.learned[: len(prompt)]) and whole.learned[len(prompt)]
    assert chat.said(whole.ids[len(prompt) : -1]) == r"\boxed{19}"


def test_a_tokenizer_without_turns_gets_them_behind_its_vocabulary():
    chat = ChatFormat(load_gpt2())
    assert (chat.start, chat.end, chat.vocab_size) == (50257, 50258, 50259)
    assert ChatFormat(ByteTokenizer()).added == {}


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_transformers_applies_the_exported_template_to_the_same_ids(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    tokenizer = ByteTokenizer() if name == "bytes" else load_gpt2()
    chat = ChatFormat(tokenizer)
    config = {"chat_template": TEMPLATE, "eos_token": TURN_END}
    if name == "bytes":
        write_byte_tokenizer(tmp_path, **config)
    else:
        write_hf_tokenizer(tmp_path, turns=chat.added, **config)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    found = theirs.apply_chat_template(TALK, tokenize=True, return_dict=False)
    assert list(found) == chat.render(TALK).ids
    asked = theirs.apply_chat_template(
        TALK[:2], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert list(asked) == chat.prompt(TALK[:2])


def test_the_exported_tokenizer_reads_back_with_the_same_turns(tmp_path):
    chat = ChatFormat(load_gpt2())
    write_hf_tokenizer(tmp_path, turns=chat.added)
    again = ChatFormat(load_tokenizer(tmp_path))
    assert (again.start, again.end, again.added) == (chat.start, chat.end, {})
    assert again.render(TALK) == chat.render(TALK)


def packed(count=9, **options):
    chat = ChatFormat(ByteTokenizer())
    talks = [
        chat.render(
            [
                {"role": "user", "content": "x" * n},
                {"role": "assistant", "content": "y" * (n % 4 + 1)},
            ]
        )
        for n in range(1, count + 1)
    ]
    options = {"seed": 1, "batch_size": 2, "seq_len": 96} | options
    return talks, PackedConversations(talks, **options)


def test_every_conversation_comes_whole_and_once_an_epoch():
    talks, source = packed(batch_size=1)
    rows = [source.batch(step) for step in range(source.rows)]
    found = []
    for row in rows:
        ids, targets, starts = (row[n][0, 0] for n in ("input_ids", "targets", "starts"))
        for start in np.unique(starts[targets != IGNORED]):
            place = np.flatnonzero((starts == start) & (ids != 0))
            found.append(tuple(ids[place]))
    assert sorted(found) == sorted(tuple(talk.ids[:-1]) for talk in talks)
    learned = sum(int((row["targets"] != IGNORED).sum()) for row in rows)
    assert learned == sum(sum(talk.learned) for talk in talks)


def test_a_packed_conversation_gives_the_log_probabilities_of_it_alone():
    here = devices.use("cpu")
    model = make_learner(MODEL, OptimConfig(lr=1e-3), here, seed=1).model
    _, source = packed()
    batch = {name: rows[0] for name, rows in source.batch(0).items()}
    together = model.token_logprob(
        model(batch["input_ids"], starts=batch["starts"]), batch["targets"]
    ).data
    alone = 0.0
    rows = zip(batch["input_ids"], batch["targets"], batch["starts"], strict=True)
    for ids, targets, starts in rows:
        for start in np.unique(starts[targets != IGNORED]):
            place = starts == start
            one = model.token_logprob(model(ids[place][None]), targets[place][None]).data
            alone += float(one.sum())
    np.testing.assert_allclose(float(together.sum()), alone, rtol=1e-5)


@pytest.mark.parametrize("learned", [True, False])
def test_a_mask_of_all_ones_or_all_zeros_is_refused(learned):
    with pytest.raises(UsageError, match="the mask is wrong"):
        PackedConversations([Rendered([1, 2, 3], [learned] * 3)], seed=0, batch_size=1, seq_len=8)


def test_a_conversation_longer_than_a_row_is_refused():
    with pytest.raises(UsageError, match=r"train.seq_len=8: the longest conversation has \d+"):
        packed(seq_len=8)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "no JSON"),
        ("[]", "no `messages`"),
        ('{"text": "a"}', "no `messages`"),
        ('{"messages": []}', "no messages"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "role='tool', choose one of system"),
        ('{"messages": [{"role": "user", "content": 3}]}', "content is no text"),
        ('{"messages": ["hello"]}', "no table of role and content"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "take turns"),
        (
            '{"messages": [{"role": "user", "content": "a"},'
            ' {"role": "assistant", "content": " "}]}',
            "the assistant says nothing",
        ),
    ],
)
def test_what_is_no_conversation_names_file_and_line(tmp_path, row, said):
    good = json.dumps({"messages": TALK})
    path = tmp_path / "talks.jsonl"
    path.write_text(f"{good}\n\n{row}\n")
    with pytest.raises(UsageError, match=said) as error:
        read_conversations(path)
    assert f"{path}:3" in str(error.value)


def test_conversations_are_read_as_they_stand(tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n")
    assert read_conversations(path) == [check_messages(TALK, "here")]
