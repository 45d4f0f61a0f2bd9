"""Parsing and compiling as part of another program, without a trace in it.

Source is instrumented inside the user's process, so two side effects of a plain `ast.parse` must not show: a text that
is parsed a second time, after an edit, must not repeat the parser's warnings; and building a tree of many small
objects must not set off the garbage collector over and over, which takes longer than the parsing itself.
"""

from __future__ import annotations

import ast
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType


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


@contextmanager
def parser_warnings_muted() -> Iterator[None]:
    """Keep warnings about syntax silent, without `warnings.catch_warnings`.

    That one marks the filters as changed, which makes Python forget the warnings the program has shown already, and
    show them again.
    """
    muted: list[tuple[str, None, type[Warning], None, int]] = [
        ("ignore", None, SyntaxWarning, None, 0),
        ("ignore", None, DeprecationWarning, None, 0),
    ]
    filters: list[object] = warnings.filters  # type: ignore[assignment]
    filters[:0] = muted
    try:
        yield
    finally:
        for one in muted:
            if one in filters:
                filters.remove(one)


def parse_again(text: str, path: str) -> ast.Module:
    """The tree of an edited text; warns of nothing, as the original was parsed before."""
    with parser_warnings_muted():
        tree = compile(text, path, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    return tree


def compile_tree(tree: ast.Module, path: str, optimize: int = -1) -> CodeType:
    """The code of a module's tree, with nothing inherited from the compiler flags of this file."""
    code = compile(tree, path, "exec", dont_inherit=True, optimize=optimize)
    assert isinstance(code, CodeType)
    return code
