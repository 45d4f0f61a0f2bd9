"""Packing: a program's syntax tree with the boot statement, compiled in the format of a ``.pyc``.

The statement follows the docstring and the ``from __future__`` imports, which must be first, and has the position of
the first line, so that it adds no name, line or column.
"""

from __future__ import annotations

import ast
import importlib.util
import marshal
from types import CodeType
from typing import TYPE_CHECKING, Any, cast

from gemini.launcher.process.bootstrap import boot

if TYPE_CHECKING:
    from gemini.launcher.process.bootstrap import BootPlan


def boot_statement(plan: BootPlan) -> ast.Expr:
    """Return the statement that runs `boot` with `plan`."""
    code, data = marshal.dumps(boot.__code__), marshal.dumps(cast(Any, plan))
    text = f"exec(__import__('marshal').loads({code!r}), {{'PLAN': __import__('marshal').loads({data!r})}})"
    return cast(ast.Expr, ast.parse(text).body[0])


def set_position(statement: ast.stmt, line: int = 1) -> None:
    """Set all positions in `statement` to the start of `line`."""
    for node in ast.walk(statement):
        if "lineno" in node._attributes:
            vars(node).update(lineno=line, col_offset=0, end_lineno=line, end_col_offset=0)


def insert_boot_statement(tree: ast.Module, plan: BootPlan) -> ast.Module:
    """Return `tree` with the boot statement after the docstring and the ``__future__`` imports."""
    at = 0
    for statement in tree.body:
        is_docstring = at == 0 and isinstance(statement, ast.Expr) and _is_text(statement.value)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__" and not statement.level
        if not (is_docstring or is_future):
            break
        at += 1
    first = boot_statement(plan)
    set_position(first)
    return ast.Module([*tree.body[:at], first, *tree.body[at:]], tree.type_ignores)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def to_pyc(code: CodeType) -> bytes:
    """Return `code` as a compiled file: magic number, no flags, no source time, no source size."""
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)
