"""Expression text with precedence: pieces of Python that add parentheses where needed."""

from __future__ import annotations

import re
from dataclasses import dataclass

ATOM, POWER, UNARY, TIMES, PLUS, SHIFT, AND, XOR, OR, COMPARE = 16, 14, 13, 12, 11, 10, 9, 8, 7, 6


@dataclass(frozen=True)
class Text:
    """An expression and its precedence."""

    code: str
    binds: int = ATOM

    def __str__(self) -> str:
        return self.code

    def at(self, binds: int) -> str:
        """Return the code for a place that needs at least this precedence."""
        return self.code if self.binds >= binds else f"({self.code})"

    @property
    def owner(self) -> str:
        """The code for a place before a dot or a bracket; a bare number is parenthesized."""
        code = self.at(ATOM)
        return f"({code})" if re.fullmatch(r"[\d.]+", code) else code


def infix(left: Text, sign: str, right: Text, binds: int) -> Text:
    """Return a binary operation; equal precedence is left-associative, except for powers and comparisons."""
    first = left.at(binds + 1 if binds in (COMPARE, POWER) else binds)
    second = right.at(UNARY if binds == POWER else binds + 1)
    return Text(f"{first}{_sign(sign, left, right)}{second}", binds)


def _sign(sign: str, left: Text, right: Text) -> str:
    """Return the spaced operator; formatters hug powers of simple operands."""
    if sign == "**" and all(re.fullmatch(r"-?[\w.]+", side.code) for side in (left, right)):
        return "**"
    return f" {sign} "


def subscript(owner: str, index: str) -> str:
    """Return `owner[index]`."""
    return f"{owner}[{index}]"


def slice_text(start: str, stop: str, step: str | None) -> str:
    """Return the text of a slice; colons between anything but names and numbers are spaced as operators."""
    parts = [start, stop] if step is None else [start, stop, step]
    if all(re.fullmatch(r"-?\w*", part) for part in parts):
        return ":".join(parts)
    text = parts[0]
    for part in parts[1:]:
        text += f"{' ' if text and not text.endswith(': ') else ''}:{' ' if part else ''}{part}"
    return text.strip()
