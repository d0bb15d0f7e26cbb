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
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from xtrain.data.tokenizers.gpt2 import END_OF_TEXT, END_OF_TEXT_ID, gpt2_ranks


def write_hf_tokenizer(directory: str | Path) -> list[Path]:
    """Write tokenizer.json and tokenizer_config.json into `directory` (created), return the paths.

    `transformers.AutoTokenizer.from_pretrained(directory)` then gives the ids of `load_gpt2()`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, content in (("tokenizer.json", _tokenizer()), ("tokenizer_config.json", _config())):
        path = directory / name
        path.write_text(json.dumps(content, indent=1, ensure_ascii=True) + "\n", encoding="ascii")
        paths.append(path)
    return paths


def _tokenizer() -> dict:
    vocab, merges = _vocab_and_merges()
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": END_OF_TEXT_ID,
                "content": END_OF_TEXT,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
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
            "vocab": {**vocab, END_OF_TEXT: END_OF_TEXT_ID},
            "merges": merges,
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
    letters = _byte_letters()
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


def _byte_letters() -> dict[int, str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    letters = {b: chr(b) for b in printable}
    return letters | {b: chr(256 + n) for n, b in enumerate(others)}
