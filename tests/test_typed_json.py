"""Own JSON files are read by their stated shape; whatever is wrong is one line with its place."""

import os

import pytest

from xtrain.errors import UsageError
from xtrain.typed_json import COUNT, NAME, TIME, Matching, OneOf, checked, parse, read_json

SHAPE = {
    "name": NAME,
    "steps": COUNT,
    "started": TIME,
    "status": OneOf("RUNNING", "KILLED"),
    "rate?": (float, None),
    "tags?": {str: str},
    "checks?": [{"name": str, "value": (float, None)}],
}
SOUND = {
    "name": "v0",
    "steps": 3,
    "started": "2026-01-02T03:04:05.123456+00:00",
    "status": "KILLED",
    "rate": 1,
    "tags": {"a": "b"},
    "checks": [{"name": "loss", "value": None}],
    "more": [1],
}


def test_a_value_of_its_shape_is_given_back_with_what_else_it_holds():
    assert checked(SOUND, SHAPE) == SOUND


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"name": "../x"}, 'name is "../x", not a name without / that starts with no dot'),
        ({"name": 7}, "name is 7, not a name"),
        ({"steps": -1}, "steps is -1, not a whole number from 0 to 9223372036854775807"),
        ({"steps": True}, "steps is true, not a whole number"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"started": "today"}, 'started is "today", not a date and time'),
        ({"status": "DONE"}, 'status is "DONE", not one of RUNNING, KILLED'),
        ({"rate": "fast"}, 'rate is "fast", not a number or null'),
        ({"rate": False}, "rate is false"),
        ({"rate": 10**400}, "rate is 1000"),
        ({"tags": {"a": 1}}, "tags.a is 1, not a text"),
        ({"tags": []}, "tags is [], not an object"),
        ({"checks": None}, "checks is null, not a list"),
        ({"checks": [{"name": "loss"}]}, "checks[0].value is missing, not a number or null"),
    ],
)
def test_the_first_field_that_is_wrong_is_named_with_its_value(changed, line):
    with pytest.raises(ValueError) as refused:
        checked({**SOUND, **changed}, SHAPE)
    assert str(refused.value).startswith(line)


def test_a_wrong_field_inside_one_of_several_shapes_is_named():
    with pytest.raises(ValueError, match=r"a is 1, not a text"):
        checked({"a": 1}, ({"a": str}, None))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"", "not JSON: Expecting value at character 0"),
        (b'{"a": 1', "not JSON: Expecting"),
        (b'{"a": NaN}', "not JSON: NaN"),
        (b"\xff\xfe", "byte 0 is not UTF-8"),
        (b'"\\ud800"', "half of a character"),
        (b'{"a\\u0000": 1}', "a text holds a NUL"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": ' * 40 + b"1" + b"}" * 40, "nested too deep"),
        (b"[1e999]", "a number is too large"),
        (b"1" * 10_000, "Exceeds the limit"),
    ],
)
def test_a_text_that_is_no_json_is_one_line(text, line):
    with pytest.raises(ValueError, match="^" + line):
        parse(text)


def test_a_damaged_file_is_named_and_one_that_is_not_there_is_not_found(tmp_path):
    path = tmp_path / "note.json"
    with pytest.raises(FileNotFoundError):
        read_json(path, dict)
    path.write_text("[1]")
    with pytest.raises(UsageError, match=r"note\.json is damaged: \[1\], not an object"):
        read_json(path, dict)
    path.write_text("{}")
    assert read_json(path, dict) == {}


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "endless"):
        with pytest.raises(UsageError, match=name):
            read_json(tmp_path / name, dict)


def test_a_pattern_matches_the_whole_text():
    with pytest.raises(ValueError, match="a letter"):
        checked("ab", Matching("[a-z]", "a letter"))
