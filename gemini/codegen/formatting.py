"""Formatting: logical lines broken to the width, the way formatters do it.

A line that is too long is opened at its last bracket: what is inside goes on a line of its own, or one part a line with
a comma after each.
"""

from __future__ import annotations

WIDTH = 120
_OPEN, _CLOSE = "([{", ")]}"


def wrapped(line: str, indent: int = 0) -> list[str]:
    """A logical line as physical ones."""
    space = " " * indent
    inner = len(line) - len(line.lstrip(" "))
    space, line = space + " " * inner, line.lstrip(" ")
    if len(space) + len(line) <= WIDTH or line.startswith("#"):
        return [space + line]
    code, comment = _split_comment(line)
    if comment and len(space) + len(code) <= WIDTH:
        return [f"{space}# {comment}", space + code]
    if comment:
        return [f"{space}# {comment}", *wrapped(code, len(space))]
    return _opened(code, len(space))


def _opened(code: str, indent: int) -> list[str]:
    span = _last_bracket(code)
    if span is None:
        return [" " * indent + code]
    start, end = span
    head, body, tail = code[: start + 1], code[start + 1 : end], code[end:]
    space = " " * (indent + 4)
    if len(space) + len(body) <= WIDTH:
        return [" " * indent + head, space + body, " " * indent + tail]
    lines = [" " * indent + head]
    for part in split_parts(body):
        comma = "" if " for " in part and len(split_parts(body)) == 1 else ","
        lines += _with_tail(wrapped(part, indent + 4), comma)
    return [*lines, " " * indent + tail]


def _with_tail(lines: list[str], tail: str) -> list[str]:
    return [*lines[:-1], lines[-1] + tail]


def _last_bracket(code: str) -> tuple[int, int] | None:
    """The last pair of brackets at the outermost level."""
    stack: list[int] = []
    found = None
    for at, char in _plain_characters(code):
        if char in _OPEN:
            stack.append(at)
        elif char in _CLOSE:
            start = stack.pop()
            if not stack and at > start + 1:
                found = start, at
    return found


def split_parts(body: str) -> list[str]:
    """The parts of a text between commas."""
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


def _plain_characters(code: str) -> list[tuple[int, str]]:
    """The characters outside strings, with their places."""
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
