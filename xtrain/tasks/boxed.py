r"""The answer in a completion: what stands in its last \boxed{}, braces matched.

parse_boxed(r"so \boxed{1,234}")    -> "1,234"
parse_integer("1,234")              -> 1234
"""

import re

_OPEN = r"\boxed{"
# Digits with or without separators of thousands, a sign of either shape before them.
_INTEGER = re.compile(r"[+\-\u2212]?\s*(?:\d{1,3}(?:,\d{3})+|\d+)")


def parse_boxed(text: str) -> str | None:
    r"""What stands in the last complete \boxed{} of a text, without outer spaces; None if none is.

    Braces inside it are matched, so \boxed{\text{4}} gives \text{4}. One that is never closed is no
    box, whatever stands behind it; an earlier one then counts.
    """
    start = len(text)
    while (start := text.rfind(_OPEN, 0, start)) >= 0:
        depth, inside = 1, start + len(_OPEN)
        for at in range(inside, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[inside:at].strip()
    return None


def parse_integer(text: str | None) -> int | None:
    """The integer that a text is, or None: spaces, a sign and separators of thousands may be there.

    Only ASCII digits are digits: int() would take others too, which no generator writes.
    """
    if text is None or (not text.isascii() and "\u2212" not in text):
        return None
    body = text.strip()
    if not _INTEGER.fullmatch(body):
        return None
    digits = body.replace(",", "").replace("\u2212", "-").replace(" ", "").replace("\t", "")
    return int(digits) if len(digits) <= 1000 else None
