"""Source names: the statement of the model's code that made a value, read from its file.

Best effort: if a file cannot be found or parsed, names are derived from scopes and ops.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterator

_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)


class ModelSources:
    """Finds statements by `folder/file.py:line`."""

    def __init__(self, preferred: Iterator[str] | tuple[str, ...] = ()) -> None:
        self.files: dict[str, str] = {}
        for name in (*preferred, *list(sys.modules)):
            path = getattr(sys.modules.get(name), "__file__", None)
            if path and path.endswith(".py"):
                self.files.setdefault("/".join(path.split(os.sep)[-2:]), path)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - lives as long as one generation
    def statement(self, line: str) -> ast.stmt | None:
        """Return the innermost simple statement at a line."""
        short, _, number = line.rpartition(":")
        path = self.files.get(short)
        if path is None or not number.isdigit():
            return None
        try:
            return _statements(path, os.stat(path).st_mtime_ns).get(int(number))
        except OSError:
            return None


@functools.lru_cache(maxsize=64)
def _statements(path: str, changed: int) -> dict[int, ast.stmt]:  # noqa: ARG001 - a file that changed is read again
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[int, ast.stmt] = {}
    for one in ast.walk(tree):
        if isinstance(one, _SIMPLE):
            for line in range(one.lineno, (one.end_lineno or one.lineno) + 1):
                known = found.get(line)
                if known is None or one.lineno >= known.lineno:
                    found[line] = one
    return found


_OPERATORS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floordiv", ast.Mod: "remainder",
    ast.Pow: "pow", ast.MatMult: "matmul", ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor", ast.USub: "neg",
    ast.Invert: "invert", ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip


def outermost(expr: ast.expr | None, made_by: str, is_module: bool) -> bool:
    """Return whether an expression's outermost operation is the op or module of this name."""
    if isinstance(expr, ast.IfExp):
        return outermost(expr.body, made_by, is_module) or outermost(expr.orelse, made_by, is_module)
    if isinstance(expr, ast.Call):
        return _calls(expr.func, made_by, is_module)
    if is_module:
        return False
    plain = made_by.strip("_")
    if isinstance(expr, ast.BinOp):
        name = _OPERATORS.get(type(expr.op), "")
        return plain in (name, f"r{name}", f"i{name}")
    if isinstance(expr, ast.UnaryOp):
        return plain == _OPERATORS.get(type(expr.op), "-")
    if isinstance(expr, ast.Compare):
        return plain == _OPERATORS.get(type(expr.ops[0]), "-")
    if isinstance(expr, ast.Subscript):
        return made_by == "__getitem__"
    return isinstance(expr, ast.Attribute) and expr.attr == made_by


def _calls(function: ast.expr, made_by: str, is_module: bool) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name == made_by or (is_module and isinstance(function, (ast.Name, ast.Subscript))):
        return True
    return is_module and made_by.isdigit()


def target_names(statement: ast.stmt | None) -> list[str]:
    """Return the names that a statement assigns, as the parts of its value; empty if it does something else."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        target = statement.target
    else:
        return []
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    names = [_target_name(part) for part in parts]
    return names if all(names) else []


def _target_name(target: ast.expr) -> str:
    if isinstance(target, ast.Name):
        return target.id
    return target.attr if isinstance(target, ast.Attribute) else ""
