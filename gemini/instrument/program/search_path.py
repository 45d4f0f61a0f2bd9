"""Search path: the folders that a script adds to `sys.path`, read from its source.

    sys.path.append("..")
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "src"))
    sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

The expressions are evaluated by a small interpreter of path functions; all other expressions are skipped.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.text.source_file import SourceFile

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "os.path.join": os.path.join,
    "os.path.dirname": os.path.dirname,
    "os.path.split": os.path.split,
    "os.path.abspath": os.path.abspath,
    "os.path.realpath": os.path.realpath,
    "os.path.normpath": os.path.normpath,
    "os.path.expanduser": os.path.expanduser,
    "os.getcwd": os.getcwd,
    "pathlib.Path": Path,
    "pathlib.Path.cwd": Path.cwd,
    "builtins.str": str,
    "os.fspath": os.fspath,
}
_METHODS = {"resolve", "absolute", "joinpath", "as_posix", "expanduser"}
_CONSTANTS = {"os.pardir": os.pardir, "os.curdir": os.curdir}


class _UnknownValue(Exception):
    """The value is known only at run time."""


def find_added_folders(source: SourceFile) -> list[str]:
    """Return the folders, in order, that `source` adds to `sys.path` and that exist."""
    if "path" not in source.text:
        return []
    unit, found = Unit(source), []
    for call in unit.nodes(ast.Call):
        name = unit.resolve(call.func)
        if name in ("sys.path.insert", "sys.path.append", "site.addsitedir") and call.args:
            found += _folders(unit, call.args[-1])
        elif name == "sys.path.extend" and call.args and isinstance(call.args[0], (ast.List, ast.Tuple)):
            found += [folder for each in call.args[0].elts for folder in _folders(unit, each)]
    return [folder for folder in found if os.path.isdir(folder)]


def _folders(unit: Unit, expr: ast.expr) -> list[str]:
    try:
        return [os.path.abspath(os.fspath(_PathEvaluator(unit).of(expr)))]
    except (_UnknownValue, TypeError, ValueError, OSError, IndexError, AttributeError, RecursionError):
        return []


class _PathEvaluator:
    """Evaluates expressions of paths."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def of(self, expr: ast.expr) -> Any:
        if isinstance(expr, ast.Constant):
            return expr.value
        if isinstance(expr, ast.Name) and expr.id == "__file__":
            return os.path.abspath(self.unit.source.path)
        if isinstance(expr, ast.Name):
            return self._variable(expr.id)
        if isinstance(expr, ast.BinOp) and isinstance(expr.op, (ast.Div, ast.Add)):
            left, right = self.of(expr.left), self.of(expr.right)
            return left / right if isinstance(expr.op, ast.Div) else left + right
        if isinstance(expr, ast.Call):
            return self._call(expr)
        if isinstance(expr, ast.Subscript):
            return self._item(expr)
        if isinstance(expr, ast.Attribute):
            return self._attribute(expr)
        raise _UnknownValue

    def _item(self, expr: ast.Subscript) -> Any:
        known = {
            "sys.argv": [self.unit.source.path],
            "sys.path": [os.path.dirname(os.path.abspath(self.unit.source.path))],
        }
        values = known.get(self.unit.resolve(expr.value) or "")
        return (self.of(expr.value) if values is None else values)[self.of(expr.slice)]

    def _attribute(self, expr: ast.Attribute) -> Any:
        name = self.unit.resolve(expr)
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if expr.attr in ("parent", "parents"):
            return getattr(self.of(expr.value), expr.attr)
        raise _UnknownValue

    def _call(self, call: ast.Call) -> Any:
        if call.keywords:
            raise _UnknownValue
        function = _FUNCTIONS.get(self.unit.resolve(call.func) or "")
        if function is not None:
            return function(*map(self.of, call.args))
        if isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS:
            return getattr(self.of(call.func.value), call.func.attr)(*map(self.of, call.args))
        raise _UnknownValue

    def _variable(self, name: str) -> Any:
        """Return the value of a name that the file assigns once, at its top level."""
        values = [
            node.value
            for node in self.unit.tree.body
            if isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        ]
        if len(values) != 1:
            raise _UnknownValue
        return self.of(values[0])
