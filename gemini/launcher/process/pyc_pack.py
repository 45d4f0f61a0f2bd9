"""From a program's syntax tree to the bytes that `python` runs: our first statement, compiled, as a ``.pyc``.

The statement goes behind the docstring and the ``from __future__`` imports, which must come first, and carries the
position of the first line, so that nothing of it shows: no name, no line, no column.
"""

from __future__ import annotations

import ast
import importlib.util
import marshal
from types import CodeType
from typing import TYPE_CHECKING, Any, cast

from gemini.launcher.process.bootstrap import boot

if TYPE_CHECKING:
    from gemini.launcher.process.bootstrap import Plan


def prologue(plan: Plan) -> ast.Expr:
    """The statement that runs `boot` with `plan`."""
    code, data = marshal.dumps(boot.__code__), marshal.dumps(cast(Any, plan))
    text = f"exec(__import__('marshal').loads({code!r}), {{'PLAN': __import__('marshal').loads({data!r})}})"
    return cast(ast.Expr, ast.parse(text).body[0])


def place(statement: ast.stmt, line: int = 1) -> None:
    """Put all of `statement` at the beginning of `line`."""
    for node in ast.walk(statement):
        if "lineno" in node._attributes:
            vars(node).update(lineno=line, col_offset=0, end_lineno=line, end_col_offset=0)


def with_prologue(tree: ast.Module, plan: Plan) -> ast.Module:
    """`tree` with the prologue as its first statement that does anything."""
    at = 0
    for statement in tree.body:
        is_docstring = at == 0 and isinstance(statement, ast.Expr) and _is_text(statement.value)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__" and not statement.level
        if not (is_docstring or is_future):
            break
        at += 1
    first = prologue(plan)
    place(first)
    return ast.Module([*tree.body[:at], first, *tree.body[at:]], tree.type_ignores)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def pyc(code: CodeType) -> bytes:
    """`code` in the form of a compiled file: magic number, no flags, no source time, no source size."""
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)
