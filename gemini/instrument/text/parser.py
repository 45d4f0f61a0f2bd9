"""Parsing and compiling as part of another program, without a trace in it.

Source is instrumented inside the user's process, so two side effects of a plain `ast.parse` must not show: a text that
is parsed a second time, after an edit, must not repeat the parser's warnings; and building a tree of many small
objects must not set off the garbage collector over and over, which takes longer than the parsing itself.
"""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType

from gemini.instrument.text.positions import first_line
from gemini.quiet_warnings import muted

_ODD = re.compile("[\\r\\v\\f\\x1c-\\x1e]")  # line ends to `str.splitlines`, or to Python, but not to both alike
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from running meanwhile, if it runs at all."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def parser_warnings_muted() -> AbstractContextManager[None]:
    """Keep warnings about syntax silent."""
    return muted(SyntaxWarning, DeprecationWarning)


def parse_again(text: str, path: str) -> ast.Module:
    """The tree of an edited text; warns of nothing, as the original was parsed before."""
    with parser_warnings_muted():
        tree = compile(text, path, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


def parse_edited(tree: ast.Module, text: str, edited: list[tuple[int, int]], path: str) -> ast.Module:
    """The tree of an edited `text`, of which only the lines `edited` (first and last, ascending) differ from `tree`'s.

    Only the top-level statements on those lines are parsed; the others are the old tree's own nodes, shared. The ranges
    must not cut a statement: each begins and ends where one does.
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
    """The code of a module's tree, with nothing inherited from the compiler flags of this file."""
    code = compile(tree, path, "exec", dont_inherit=True, optimize=optimize)
    assert isinstance(code, CodeType)
    return code


def compile_data(data: bytes, path: str, optimize: int = -1) -> CodeType:
    """The code of a module's source, as Python's import makes it."""
    code = compile(data, path, "exec", dont_inherit=True, optimize=optimize)
    assert isinstance(code, CodeType)
    return code
