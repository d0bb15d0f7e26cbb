"""Conversations as tokens: Qwen3's turns, and which tokens are to be learned.

    <|im_start|>user\\n12 + 7 = ?<|im_end|>\\n<|im_start|>assistant\\n\\\\boxed{19}<|im_end|>\\n

Learned are what the assistant says and the token that ends its turn, nothing else. A tokenizer that
lacks the two framing tokens gets them behind its vocabulary: the model's rows for them are there,
as padding. The template goes into the export, so that `apply_chat_template` of transformers gives
the same ids. Spaces round a message are no part of it, in the template as here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xtrain.data.tokenizers.bytes import TURN_END, TURN_START
from xtrain.errors import UsageError

ROLES = ("system", "user", "assistant")
TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{{- (message['content'] | trim) + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

Message = Mapping[str, str]


@dataclass(frozen=True)
class Rendered:
    """ids of a conversation, and for each whether it is learned."""

    ids: list[int]
    learned: list[bool]


class ChatFormat:
    """Turns as tokens of one tokenizer: `start`, `end` ids, and the ids that a model then needs."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        found = [tokenizer.special_id(name) for name in (TURN_START, TURN_END)]
        size = tokenizer.vocab_size
        self.added = {} if None not in found else {TURN_START: size, TURN_END: size + 1}
        self.start, self.end = found if None not in found else (size, size + 1)
        self.vocab_size = max(size, self.start + 1, self.end + 1)

    def render(self, messages: Sequence[Message]) -> Rendered:
        """A whole conversation; `check_messages` has passed."""
        ids: list[int] = []
        learned: list[bool] = []
        newline = self.tokenizer.encode_ordinary("\n")
        for message in messages:
            role, content = message["role"], message["content"].strip()
            head = [self.start, *self.tokenizer.encode_ordinary(f"{role}\n")]
            if role == "assistant":
                said = [*self.tokenizer.encode_ordinary(content), self.end]
            else:  # as one text: tokens may cross the line break
                head = [self.start, *self.tokenizer.encode_ordinary(f"{role}\n{content}"), self.end]
                said = []
            ids += [*head, *said, *newline]
            learned += [False] * len(head) + [True] * len(said) + [False] * len(newline)
        return Rendered(ids, learned)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The conversation so far, and the beginning of the assistant's turn."""
        opening = [self.start, *self.tokenizer.encode_ordinary("assistant\n")]
        return [*self.render(messages).ids, *opening]

    def said(self, ids: Sequence[int]) -> str:
        """The text of a completion, without the token that ends it."""
        ids = [int(i) for i in ids]
        kept = ids[:-1] if ids and ids[-1] == self.end else ids
        known = [i for i in kept if i < self.tokenizer.vocab_size]
        return self.tokenizer.decode(known)


def check_messages(messages: object, where: str) -> list[Message]:
    """A conversation to learn from. Raises UsageError that begins with `where`.

    A system message may stand first; then user and assistant take turns, and the assistant, which
    says something each time, has the last word.
    """
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where}: no messages; a conversation is a list of role and content")
    for number, message in enumerate(messages, start=1):
        place = f"{where}: message {number}"
        if not isinstance(message, dict):
            raise UsageError(f"{place} is no table of role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UsageError(f"{place}: role={role!r}, choose one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise UsageError(f"{place}: content is no text")
        if role == "assistant" and not content.strip():
            raise UsageError(f"{place}: the assistant says nothing")
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    wanted = ["user", "assistant"] * ((len(turns) + 1) // 2)
    if not turns or len(turns) % 2 or [m["role"] for m in turns] != wanted:
        said = ", ".join(m["role"] for m in messages)
        raise UsageError(f"{where}: {said}: user and assistant take turns, the assistant ends")
    return messages


def read_conversations(path: str | Path) -> list[list[Message]]:
    """The conversations of a .jsonl file, each line a table with `messages`.

    Raises UsageError that names file and line.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"data.path={path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: no JSON ({error})") from error
        if not isinstance(row, dict) or "messages" not in row:
            raise UsageError(f'{where}: no `messages`; a line is {{"messages": [...]}}')
        found.append(check_messages(row["messages"], where))
    if not found:
        raise UsageError(f"data.path={path}: no conversation in it")
    return found
