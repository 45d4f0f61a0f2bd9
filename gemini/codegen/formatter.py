"""Formatter: breaks logical lines to the width, as common formatters do.

A line that is too long is opened at its last bracket: the contents go on a line of their own, or one part per line with
a comma after each.
"""

from __future__ import annotations

import re

WIDTH = 120
_OPEN, _CLOSE = "([{", ")]}"


def wrap_line(line: str, indent: int = 0) -> list[str]:
    """Return a logical line as physical ones."""
    space = " " * indent
    inner = len(line) - len(line.lstrip(" "))
    space, line = space + " " * inner, line.lstrip(" ")
    if len(space) + len(line) <= WIDTH or line.startswith("#"):
        return [space + line]
    code, comment = _split_comment(line)
    if comment and len(space) + len(code) <= WIDTH:
        return [f"{space}# {comment}", space + code]
    if comment:
        return [f"{space}# {comment}", *wrap_line(code, len(space))]
    return _open_bracket(code, len(space))


def _open_bracket(code: str, indent: int) -> list[str]:
    if code.startswith("return ") and len(split_parts(code[7:])) > 1:
        return _explode("return (", split_parts(code[7:]), ")", indent)
    span = _bracket(code, indent)
    if span is None:
        return [" " * indent + code]
    start, end = span
    head, body, tail = code[: start + 1], code[start + 1 : end], code[end:]
    space = " " * (indent + 4)
    if len(space) + len(body) <= WIDTH:
        return [" " * indent + head, space + body, " " * indent + tail]
    grouping = code[start] == "(" and not re.search(r"[\w)\]]$", code[:start]) and not _has_comma(body)
    return _explode(head, split_parts(body), tail, indent, comma="" if grouping else ",")


def _explode(head: str, parts: list[str], tail: str, indent: int, comma: str = ",") -> list[str]:
    """Return one part per line, each with a comma; a comprehension has one part and no comma."""
    lines = [" " * indent + head]
    for part in parts:
        opened = wrap_line(part, indent + 4)
        lines += [*opened[:-1], opened[-1] + ("" if len(parts) == 1 and " for " in part else comma)]
    return [*lines, " " * indent + tail]


def _bracket(code: str, indent: int) -> tuple[int, int] | None:
    """Return the brackets to open: the first of a definition, else the last pair that leaves short lines around it."""
    pairs = _outer_brackets(code)
    if code.startswith("def "):
        return pairs[0]
    for start, end in reversed(pairs):
        if indent + start < WIDTH and indent + len(code) - end <= WIDTH:
            return start, end
    return pairs[-1] if pairs else None


def _outer_brackets(code: str) -> list[tuple[int, int]]:
    """Return the non-empty pairs of brackets at the outermost level."""
    stack: list[int] = []
    found = []
    for at, char in _plain_characters(code):
        if char in _OPEN:
            stack.append(at)
        elif char in _CLOSE:
            start = stack.pop()
            if not stack and at > start + 1:
                found.append((start, at))
    return found


def split_parts(body: str) -> list[str]:
    """Return the parts of a text between commas."""
    parts, depth, begin = [], 0, 0
    for at, char in _plain_characters(body):
        if char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(body[begin:at].strip())
            begin = at + 1
    return [part for part in [*parts, body[begin:].strip()] if part]


def _has_comma(body: str) -> bool:
    depth = 0
    for _, char in _plain_characters(body):
        depth += (char in _OPEN) - (char in _CLOSE)
        if char == "," and depth == 0:
            return True
    return False


def _plain_characters(code: str) -> list[tuple[int, str]]:
    """Yield the characters outside strings, with their positions."""
    found, quote, at = [], "", 0
    while at < len(code):
        char = code[at]
        if quote:
            if char == "\\":
                at += 1
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        else:
            found.append((at, char))
        at += 1
    return found


def _split_comment(line: str) -> tuple[str, str]:
    for at, char in _plain_characters(line):
        if char == "#":
            return line[:at].rstrip(), line[at + 1 :].strip()
    return line, ""
