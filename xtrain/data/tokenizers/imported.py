"""The tokenizer of a Hugging Face directory (tokenizer.json), with the interface of GPT-2's own.

Text is ordinary here too: special tokens written in a document are encoded as their characters.
The library `tokenizers` does the work. An export of this program holds the GPT-2 encoding, which is
recognised by its file and read with the faster tokenizer that training used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from xtrain.data.tokenizers.bytes import NAME, ByteTokenizer
from xtrain.data.tokenizers.encoded import Encoded, UnreadableText, in_threads
from xtrain.data.tokenizers.gpt2 import END_OF_TEXT, Tokenizer, load_gpt2
from xtrain.errors import UsageError
from xtrain.typed_json import Between, open_regular, read_json

FILE = "tokenizer.json"
# Far beyond any vocabulary there is, and small enough for one table of its ids.
MOST_IDS = 1 << 22
END_SHAPE = {"eos_token_id?": (None, Between(0, MOST_IDS - 1), [Between(0, MOST_IDS - 1)])}
# The largest tokenizer.json that is read; those of the largest vocabularies have 35 MB.
MOST_BYTES = 1 << 28
# Of the tokenizer.json that `hf_tokenizer.write_hf_tokenizer` writes.
GPT2_SHA256 = "85b713689b1c16e69a29b6cec4e6e13f39357a0f028839fced57b4e157c49555"


class ImportedTokenizer:
    """`vocab_size` ids, `eot` the id between documents, `fingerprint` a sha256 in hex.

    Raises UsageError when tokenizer.json cannot be read, has more than MOST_IDS ids or drops merges
    at random, and when no id ends a text.
    """

    def __init__(self, directory: Path) -> None:
        import tokenizers

        self._path = Path(directory) / FILE
        content = _content(self._path)
        with _library_errors(lambda said: UsageError(f"{self._path} cannot be read: {said}")):
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._tokenizer.encode_special_tokens = True  # as ordinary text, that is
            self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        if self.vocab_size > MOST_IDS:
            raise UsageError(f"{self._path}: {self.vocab_size} ids, at most {MOST_IDS} are read")
        if getattr(self._tokenizer.model, "dropout", None):
            raise UsageError(
                f"{self._path}: dropout={self._tokenizer.model.dropout}: merges dropped at random "
                "give other tokens each time; set it to null"
            )
        self.eot = self._end_of_text(Path(directory))
        facts = f"{hashlib.sha256(content).hexdigest()} {self.eot}"
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()
        self._sizes = self._bytes_by_id() if self._keeps_every_byte() else None

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens in it are ordinary text."""
        return self._encode(text).tolist()

    def encode_batch(self, texts: Sequence[str], *, workers: int = 0) -> list[np.ndarray]:
        """Return one uint32 array of ids a text, encoded by `workers` threads (0: one a core).

        Raises UnreadableText when the library fails on a text.
        """
        return in_threads(self._encode, texts, workers)

    def encode_documents(self, texts: Sequence[str], *, workers: int = 0) -> list[Encoded]:
        """Return each text with the end-of-text id behind it, which stands for what is left out.

        Raises UnreadableText when the library fails on a text.
        """
        return in_threads(self._encode_document, texts, workers)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        An id that the model has and the tokenizer has not is no text. Special tokens are shown.
        """
        with _library_errors(lambda said: UsageError(f"{self._path} fails on ids: {said}")):
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def special_id(self, name: str) -> int | None:
        """The id of a special token, None if there is none of that name."""
        return self._tokenizer.token_to_id(name)

    def _encode(self, text: str) -> np.ndarray:
        # A batch of one: unlike `encode` it leaves the interpreter to the other threads.
        with self._failing_on(text):
            (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(found.ids, np.uint32)

    def _encode_document(self, text: str) -> Encoded:
        end = np.uint32(self.eot)
        if self._sizes is not None:
            ids = np.append(self._encode(text), end)
            return Encoded(ids, self._sizes.take(ids))
        with self._failing_on(text):
            (found,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        # Places in the text as it was. Letters of several tokens belong to the first of them.
        ends = np.array([last for _, last in found.offsets], np.int64)
        ends = np.maximum.accumulate(np.append(ends, len(text)))
        sizes = np.diff(_byte_places(text)[ends], prepend=0)
        return Encoded(np.append(np.array(found.ids, np.uint32), end), sizes)

    def _failing_on(self, text: str):
        begins = repr(text[:40])
        return _library_errors(
            lambda said: UnreadableText(
                f"{self._path} fails on a text of {len(text)} characters that begins {begins}: "
                f"{said}; leave the text out or take another tokenizer",
                text,
            )
        )

    def _keeps_every_byte(self) -> bool:
        """Whether the bytes of a text are those of its tokens: nothing is normalised or skipped."""
        from tokenizers.decoders import ByteLevel

        added = self._tokenizer.get_added_tokens_decoder().values()
        is_plain = self._tokenizer.normalizer is None and all(each.special for each in added)
        splits = self._tokenizer.pre_tokenizer
        has_prefix = splits is not None and "add_prefix_space=True" in repr(splits)
        return is_plain and not has_prefix and isinstance(self._tokenizer.decoder, ByteLevel)

    def _end_of_text(self, directory: Path) -> int:
        named = self._tokenizer.token_to_id(END_OF_TEXT)
        if named is not None:
            return named
        ids = end_ids(directory)
        if not ids:
            raise UsageError(f"{directory}: neither {END_OF_TEXT} in {FILE} nor an eos_token_id")
        if not 0 <= ids[0] < self.vocab_size:
            raise UsageError(
                f"{directory}: eos_token_id={ids[0]}, {FILE} has {self.vocab_size} ids"
            )
        return ids[0]

    def _bytes_by_id(self) -> np.ndarray:
        from tokenizers.decoders import ByteLevel

        sizes = np.zeros(self.vocab_size, np.uint32)
        added = self._tokenizer.get_added_tokens_decoder()
        byte_level = isinstance(self._tokenizer.decoder, ByteLevel)  # one letter a byte
        for i in range(self.vocab_size):
            piece = self._tokenizer.id_to_token(i)
            if piece is None or i == self.eot:
                continue
            letters = byte_level and i not in added
            sizes[i] = len(piece) if letters else len(self.decode([i]).encode())
        return sizes


def load_tokenizer(directory: str | Path | None) -> Tokenizer | ByteTokenizer | ImportedTokenizer:
    """Return the tokenizer of a Hugging Face directory, GPT-2's for None, one of bytes for `bytes`.

    Raises UsageError when there is none in the directory, or it cannot be read.
    """
    if directory is None:
        return load_gpt2()
    if directory == NAME:
        return ByteTokenizer()
    digest = hashlib.sha256(_content(Path(directory) / FILE)).hexdigest()
    return load_gpt2() if digest == GPT2_SHA256 else ImportedTokenizer(Path(directory))


def _content(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path.parent}: no readable {FILE} ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if len(content) > MOST_BYTES:
        raise UsageError(f"{path} cannot be read: more than {MOST_BYTES} bytes")
    return content


@contextmanager
def _library_errors(refusal: Callable[[str], UsageError]) -> Iterator[None]:
    """Turn what the library raises into a refusal: bare Exceptions, and panics, which are none."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise refusal(" ".join(str(error).split())[:200]) from error


def _byte_places(text: str) -> np.ndarray:
    """(len(text) + 1,): how many UTF-8 bytes come before each character, and in all."""
    if text.isascii():
        return np.arange(len(text) + 1)
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    sizes = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    return np.concatenate([[0], np.cumsum(sizes)])


def end_ids(directory: Path) -> list[int]:
    """Return the ids that end a text by config.json and generation_config.json, in that order."""
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        try:
            stated = read_json(Path(directory) / name, END_SHAPE).get("eos_token_id")
        except FileNotFoundError:
            continue
        found += stated if isinstance(stated, list) else [] if stated is None else [stated]
    return list(dict.fromkeys(found))
