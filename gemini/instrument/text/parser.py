"""Parsing and compiling inside the user's process, without side effects.

A text that is parsed a second time, after an edit, must not repeat the parser's warnings; and building a tree of many
small objects must not trigger the garbage collector repeatedly, which takes longer than the parsing itself.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType

from gemini.instrument.text.positions import first_line
from gemini.quiet_warnings import mute_warnings

_ODD = re.compile("[\\r\\v\\f\\x1c-\\x1e]")  # line ends to one of `str.splitlines` and Python, not to both
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


@contextmanager
def pause_collector() -> Iterator[None]:
    """Disable the garbage collector meanwhile, if it is enabled."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def mute_parser_warnings() -> AbstractContextManager[None]:
    """Silence warnings about syntax."""
    return mute_warnings(SyntaxWarning, DeprecationWarning)


def parse_again(text: str, path: str) -> ast.Module:
    """Return the tree of an edited text, without the warnings that the original has already raised."""
    with mute_parser_warnings():
        tree = compile(text, path, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


def parse_edited(tree: ast.Module, text: str, edited: list[tuple[int, int]], path: str) -> ast.Module:
    """Return the tree of `text`, which differs from that of `tree` only on the line ranges `edited` (ascending).

    Only the top-level statements on those lines are parsed; the other nodes are shared with `tree`. A range begins and
    ends where a statement does.
    """
    lines = text.splitlines(keepends=True) if text.isascii() and not _ODD.search(text) else _LINE.findall(text)
    fresh: list[ast.stmt] = []
    at = 0
    for first, last in edited:
        part = "\n" * (first - 1) + "".join(lines[first - 1 : last])
        while at < len(tree.body) and first_line(tree.body[at]) < first:
            fresh.append(tree.body[at])
            at += 1
        fresh.extend(parse_again(part, path).body)
        while at < len(tree.body) and first_line(tree.body[at]) <= last:
            at += 1
    return ast.Module([*fresh, *tree.body[at:]], [])


def compile_tree(tree: ast.Module, path: str, optimize: int = -1) -> CodeType:
    """Compile the tree of a module, without the compiler flags of this file."""
    code = compile(tree, path, "exec", dont_inherit=True, optimize=optimize)
    assert isinstance(code, CodeType)
    return code


def compile_data(data: bytes, path: str, optimize: int = -1) -> CodeType:
    """Compile the source of a module, as Python's import does."""
    code = compile(data, path, "exec", dont_inherit=True, optimize=optimize)
    assert isinstance(code, CodeType)
    return code
