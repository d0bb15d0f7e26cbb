"""Write the GPT-2 tokenizer as the files that Hugging Face libraries read.

A rank table has no merges; they are recovered from it. A token of several bytes was made by the
merge of the two tokens that are left when its bytes are merged with lower ranks only. Merges in
rank order are then GPT-2's own list. Hugging Face writes bytes as printable characters (GPT-2's
table: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on).

Both files are byte-identical on every call. `<|endoftext|>` is a special token there: unlike the
training tokenizer, Hugging Face encodes it in text as id 50256.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from xtrain.data.tokenizers.gpt2 import END_OF_TEXT, END_OF_TEXT_ID, gpt2_ranks


def write_hf_tokenizer(
    directory: str | Path, *, turns: Mapping[str, int] | None = None, **config: str
) -> list[Path]:
    """Write tokenizer.json and tokenizer_config.json into `directory` (created), return the paths.

    `transformers.AutoTokenizer.from_pretrained(directory)` then gives the ids of `load_gpt2()`.
    turns: further special tokens by name, behind the vocabulary. config: further entries of
    tokenizer_config.json, such as a chat template.
    """
    vocab, merges = _vocab_and_merges()
    special = {END_OF_TEXT: END_OF_TEXT_ID, **(turns or {})}
    added = [added_token(name, number) for name, number in special.items()]
    return write_files(
        directory,
        vocab={**vocab, END_OF_TEXT: END_OF_TEXT_ID},
        merges=merges,
        added=added,
        config=config,
    )


def write_files(
    directory: str | Path,
    *,
    vocab: Mapping[str, int],
    merges: Sequence[str],
    added: Sequence[Mapping],
    config: Mapping[str, str],
) -> list[Path]:
    """Write the two files of a byte-level encoding; the same bytes on every call."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    contents = {
        "tokenizer.json": _tokenizer(vocab, merges, added),
        "tokenizer_config.json": {**_config(), **config},
    }
    paths = []
    for name, content in contents.items():
        path = directory / name
        path.write_text(json.dumps(content, indent=1, ensure_ascii=True) + "\n", encoding="ascii")
        paths.append(path)
    return paths


def added_token(content: str, number: int) -> dict:
    """A special token as tokenizer.json lists it."""
    return {
        "id": number,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _tokenizer(vocab: Mapping[str, int], merges: Sequence[str], added: Sequence[Mapping]) -> dict:
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "add_prefix_space": False},
        "post_processor": {**byte_level, "add_prefix_space": True, "trim_offsets": False},
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": dict(vocab),
            "merges": list(merges),
        },
    }


def _config() -> dict:
    # The generic fast class: a model's own class (Qwen2Tokenizer for Qwen3) would replace the
    # pre-tokenizer in tokenizer.json by its own pattern and give other ids.
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }


@lru_cache(maxsize=1)
def _vocab_and_merges() -> tuple[dict[str, int], list[str]]:
    ranks = gpt2_ranks()
    letters = byte_letters()
    vocab, merges = {}, []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        vocab["".join(letters[b] for b in token)] = rank
        if len(token) > 1:
            pair = _merged_below(token, rank, ranks)
            assert len(pair) == 2, token
            merges.append(" ".join("".join(letters[b] for b in half) for half in pair))
    return vocab, merges


def _merged_below(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """Merge the bytes of `token` with the merges of a lower rank; what made it is left."""
    parts = [bytes([b]) for b in token]
    while True:
        pairs = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(pairwise(parts))]
        best, i = min(pairs, default=(rank, 0))
        if best >= rank:
            return parts
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def byte_letters() -> dict[int, str]:
    """The printable character that Hugging Face writes for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    letters = {b: chr(b) for b in printable}
    return letters | {b: chr(256 + n) for n, b in enumerate(others)}
