"""What Hydra and OmegaConf say over many lines, in one line that says what to do.

    usage_error(exception) -> UsageError

Keys that do not exist are answered with the nearest that do, choices with all choices.
"""

import dataclasses
import re
import shlex
import typing

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import OverrideParseException

from xtrain.config.rules import nearest
from xtrain.config.schema import RunConfig
from xtrain.errors import UsageError

GROUPS = ("run", "phase", "data", "model")

# What a value should have been, by what OmegaConf says of it.
_WANTED = (
    (r"could not be converted to Integer", "a whole number"),
    (r"could not be converted to Float", "a number"),
    (r"is not a valid bool", "true or false"),
    (r"is not Optional|Incompatible value 'None'", "something: it cannot be null"),
    (r"is not a ListConfig", "a list, as in [a,b]"),
    (r"Cannot convert '(list|dict)' to string", "text"),
    (r"is not a subclass of", "a group of keys: set them one by one, as in train.seq_len=64"),
)


def usage_error(error: Exception) -> UsageError:
    """The same refusal as a UsageError of one line."""
    if isinstance(error, UsageError):
        return error
    if isinstance(error, AssertionError):  # Hydra asserts that a group has a name, and the like
        return UsageError(
            "cannot read this: a key is not well-formed; keys are as in train.seq_len"
        )
    cause = error if error.__cause__ is None else error.__cause__
    refused = _refusal_inside(error)
    if refused is not None:
        return refused
    for explain in (_choice, _key, _sweep, _syntax, _missing, _value):
        message = explain(error, cause)
        if message:
            return UsageError(message)
    said = _joined(error if cause is error else f"{error}: {cause}")
    return UsageError(said or f"Hydra cannot read this: {type(error).__name__}")


def _refusal_inside(error: BaseException | None) -> UsageError | None:
    """Our own refusal, raised in the middle of a composition, that Hydra wrapped in its own."""
    while error is not None and not isinstance(error, UsageError):
        error = error.__cause__ or error.__context__
    return error


def unknown_key(key: str) -> str:
    """`no key model.hiden_size; nearest: model.hidden_size`, or the keys of the group."""
    near = nearest_key(key)
    if near:
        return f"no key {key}; nearest: {near}"
    group = key.split(".")[0] + "."
    siblings = [known for known in all_keys() if known.startswith(group)]
    hint = f"there are {', '.join(siblings)}" if siblings else "xtrain --cfg job lists all keys"
    return f"no key {key}; {hint}"


def nearest_key(key: str) -> str | None:
    """The key that was probably meant: the same last word elsewhere, else the closest spelling."""
    keys = {known: known for known in (*GROUPS, *all_keys()) if ("." in known) == ("." in key)}
    leaves = {known.rsplit(".", 1)[-1]: known for known in all_keys()}
    head, _, leaf = key.rpartition(".")
    inside = {k.removeprefix(f"{head}."): k for k in all_keys() if k.startswith(f"{head}.")}
    if leaf in leaves:
        return leaves[leaf]
    for known in (inside, keys, leaves):
        near = nearest(key if known is keys else leaf, known, cutoff=0.65)
        if near:
            return known[near]
    return None


def all_keys(kind: type = RunConfig, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, `seed`, `model.hidden_size`, ..."""
    keys: list[str] = []
    for name, annotation in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(annotation):
            keys += all_keys(annotation, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _choice(error: Exception, cause: Exception) -> str | None:
    found = re.search(r"Could not find '([\w/]+)/([^'/]*)'", str(error))
    if not found:
        return None
    group, name = found.groups()
    listed = re.search(r"Available options in '[^']*':\n((?:\t[^\n]*\n?)*)", str(error))
    names = listed.group(1).split() if listed else []
    names = [known for known in names if not known.startswith(("provider=", "path="))]
    near = nearest(name.lower(), names)
    hint = f"; nearest: {near}" if near else ""
    options = sorted(names, key=_by_number)
    return f"{group}={name}: there is no such {group}{hint}; choose one of {', '.join(options)}"


def _key(error: Exception, cause: Exception) -> str | None:
    found = re.search(
        r"Could not override '([^']+)'|Could not delete[^']*'([^']+)' does not exist", str(error)
    )
    if found:
        return unknown_key(found.group(1) or found.group(2))
    if re.search(r"Key '[^']*' (is )?not in ", str(cause)):
        return f"{_file(error)}{unknown_key(_full_key(cause) or str(cause))}"
    found = re.search(r"Could not append to config. An item is already at '([^']+)'", str(error))
    return f"+{found.group(1)}: the key exists, leave out the +" if found else None


def _sweep(error: Exception, cause: Exception) -> str | None:
    found = re.search(r"(?:Ambiguous value for argument|Sweep parameters) '([^']*)'", str(error))
    if not found:
        return None
    key, _, value = found.group(1).partition("=")
    one = {
        list: f"; for a list write {key}=[{value}]",
        str: f"; for one text write {typed(key, value)}",
    }
    return f"{key}={value}: to run one after the other add -m{one.get(_kind(key), '')}"


def _syntax(error: Exception, cause: Exception) -> str | None:
    if not isinstance(error, OverrideParseException):
        return None
    if not re.match("[^=]+=", error.override):
        return f"{error.override!r} is not KEY=VALUE; xtrain --help shows the common keys"
    key, _, value = error.override.partition("=")
    if _kind(key) is str:
        return f"cannot read {error.override!r}; write {typed(key, value)}"
    return f"cannot read {error.override!r}; a quote or bracket is not closed"


def typed(key: str, text: str) -> str:
    """How any text is typed in a shell as the value of a key: `'data.path="/d/x,y"'`."""
    return shlex.quote(f"{key}={QuotedString(text=text, quote=Quote.double).with_quotes()}")


def _kind(key: str) -> type | None:
    """str or list, when a key's value is one; None for numbers and for keys that there are not."""
    kind = RunConfig
    for name in key.lstrip("+~").split("."):
        kind = typing.get_type_hints(kind).get(name) if dataclasses.is_dataclass(kind) else None
    kinds = {kind, typing.get_origin(kind), *typing.get_args(kind)}
    return next((each for each in (list, str) if each in kinds), None)


def _missing(error: Exception, cause: Exception) -> str | None:
    if type(cause).__name__ != "MissingMandatoryValue":
        return None
    key = _full_key(cause) or re.sub(r".*: ", "", str(cause).splitlines()[0])
    return f"{key} is missing; say {key}=VALUE"


def _value(error: Exception, cause: Exception) -> str | None:
    wanted = next((want for pattern, want in _WANTED if re.search(pattern, str(cause))), None)
    found = re.search(r"Error merging override (.*)", str(error))
    if wanted is None:
        key = _full_key(cause)
        return f"{_file(error)}{key}: {str(cause).splitlines()[0]}" if key else None
    given = re.search(r"[Vv]alue:? '([^']*)'", str(cause))
    key = _full_key(cause)
    said = found.group(1) if found else f"{_file(error)}{key}={given.group(1) if given else ''}"
    return f"{said}: {key} must be {wanted}"


def _file(error: Exception) -> str:
    found = re.search(r"In '([\w/]+)':", str(error))
    return f"{found.group(1)}.yaml: " if found else ""


def _full_key(error: Exception) -> str | None:
    found = re.search(r"full_key: (\S+)", str(error))
    return found.group(1) if found else None


def _by_number(name: str) -> tuple[str, int]:
    letters = name.rstrip("0123456789")
    return letters, int(name[len(letters) :] or -1)


def _joined(text: object) -> str:
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return " ".join(lines[:3])
