"""JSON files read as data of a stated shape: what is not of it is one line that names the place.

A shape is written like the value it describes:

    str, bool, int, float, dict, list   a value of that type (an int is a float too, a bool is none)
    None                                null
    (A, B)                              one of several shapes
    [A]                                 a list of A
    {str: A}                            an object whose values are A, whatever its keys
    {"name": A, "name?": B}             an object with these keys, the second may be missing;
                                        other keys are let pass
    OneOf("a", "b"), Matching("regex", "words for it"), Between(low, high), Within(low, high)

Nothing in a file is trusted: not its type, its size, its encoding, nor how deep it is nested.
"""

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from xtrain.errors import UsageError

MAX_BYTES = 64 * 2**20  # the largest own file, a manifest, has kilobytes
MAX_DEPTH = 32
_SHOWN = 40


@dataclass(frozen=True, init=False)
class OneOf:
    """One of some texts."""

    choices: tuple[str, ...]

    def __init__(self, *choices: str):
        object.__setattr__(self, "choices", choices)


@dataclass(frozen=True)
class Matching:
    """A text that a regular expression matches as a whole."""

    pattern: str
    words: str


@dataclass(frozen=True)
class Between:
    """A whole number from low to high, both included."""

    low: int
    high: int


@dataclass(frozen=True)
class Within:
    """A number from low to high, both included."""

    low: float
    high: float


COUNT = Between(0, 2**63 - 1)  # what is counted: steps, tokens, processes
# The name of a run, a phase or a directory of one: it becomes a part of paths.
NAME = Matching(r"(?!\.)[^/\\\x00-\x1f\x7f]{1,200}", "a name without / that starts with no dot")
TIME = Matching(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?([+-]\d\d:\d\d|Z)?", "a date and time")


def read_json(path: str | Path, shape: object) -> object:
    """The content of a JSON file of that shape.

    Raises FileNotFoundError when there is none, and UsageError naming the file and the field for
    one that cannot be read, is no JSON or has another shape.
    """
    try:
        return checked(parse(read_bounded(Path(path))), shape)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def read_bounded(path: Path) -> bytes:
    """The bytes of a regular file of at most MAX_BYTES. Raises OSError and ValueError."""
    with open_regular(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    return content


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read, when it is one: a pipe would be waited for, a device never ends.

    Raises OSError and ValueError.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        yield file


def parse(text: bytes) -> object:
    """The value of one JSON text. Raises ValueError with one line."""
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
        _refuse_odd(value)
        if b"\\u" in text:  # an escape may spell what no UTF-8 text can hold
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError("half of a character is escaped") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    return value


def checked(value: object, shape: object, where: str = "") -> object:
    """The value, when it has the shape; else ValueError naming the field and what it should be."""
    wrong = _first_wrong(value, shape, where)
    if wrong is None:
        return value
    place, wanted, found = wrong
    shown = _show(found)
    raise ValueError(f"{place} is {shown}, not {wanted}" if place else f"{shown}, not {wanted}")


def _first_wrong(value: object, shape: object, where: str) -> tuple[str, str, object] | None:
    """(field, what it should be, what it is) of the first that is not of its shape."""
    match shape:
        case tuple():
            wrong = [_first_wrong(value, each, where) for each in shape]
            if None in wrong:
                return None
            deeper = [each for each in wrong if each[0] != where]  # the right kind, wrong inside
            return deeper[0] if deeper else (where, _words(shape), value)
        case [each] if isinstance(value, list):
            items = ((f"{where}[{i}]", each, item) for i, item in enumerate(value))
        case {} if isinstance(value, dict):
            items = _items(value, shape, where)
        case _:
            return None if _is_of(value, shape) else (where, _words(shape), value)
    for place, inner, item in items:
        wrong = _first_wrong(item, inner, place)
        if wrong is not None:
            return wrong
    return None


_MISSING = object()


def _items(value: dict, shape: dict, where: str):
    if str in shape:
        return ((_dotted(where, key), shape[str], item) for key, item in value.items())
    found = []
    for name, inner in shape.items():
        key = name.removesuffix("?")
        if key in value or key == name:
            found.append((_dotted(where, key), inner, value.get(key, _MISSING)))
    return found


def _is_of(value: object, shape: object) -> bool:
    match shape:
        case None:
            return value is None
        case OneOf(choices=choices):
            return isinstance(value, str) and value in choices
        case Matching(pattern=pattern):
            return isinstance(value, str) and re.fullmatch(pattern, value) is not None
        case Between(low=low, high=high):
            return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        case Within(low=low, high=high):
            return _is_of(value, float) and low <= value <= high
        case type():
            if isinstance(value, bool):
                return shape is bool
            if shape is float and isinstance(value, int):
                return abs(value) < 2**1000  # above, it has no float
            return isinstance(value, shape)
    return False


_TYPES = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    dict: "an object",
    list: "a list",
}


def _words(shape: object) -> str:
    match shape:
        case None:
            return "null"
        case tuple():
            return " or ".join(_words(each) for each in shape)
        case OneOf(choices=choices):
            return "one of " + ", ".join(choices)
        case Matching(words=words):
            return words
        case Between(low=low, high=high):
            return f"a whole number from {low} to {high}"
        case Within(low=low, high=high):
            return f"a number from {low:g} to {high:g}"
        case type():
            return _TYPES[shape]
    return _TYPES[type(shape)]


def _show(value: object) -> str:
    if value is _MISSING:
        return "missing"
    try:
        text = json.dumps(value)
    except ValueError:  # an integer of too many digits to print
        text = "a number of many digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _dotted(where: str, key: str) -> str:
    printable = "".join(c if c.isprintable() else "?" for c in key[:_SHOWN])
    return f"{where}.{printable}" if where else printable


def _refuse_constant(name: str) -> None:
    raise ValueError(f"not JSON: {name}")


def _refuse_odd(value: object, depth: int = 0) -> None:
    """Refuse what Python reads and could not write again, or not as a name, or not walk."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deep")
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_odd(key, depth + 1)
            _refuse_odd(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _refuse_odd(item, depth + 1)
    elif isinstance(value, str) and "\0" in value:
        raise ValueError("a text holds a NUL")
    elif isinstance(value, float) and math.isinf(value):  # 1e999 is one
        raise ValueError("a number is too large")
