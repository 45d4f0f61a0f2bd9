"""What passes have already put into a file, so that instrumenting a dump again changes nothing."""

from __future__ import annotations

import ast

from gemini.instrument.pass_manager.prelude_import import RESERVED
from gemini.instrument.passes.pass_input import Unit


def is_inserted_call(node: ast.AST | None) -> bool:
    """Whether `node` is a call such as `__gemini__.on(x)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == RESERVED
    )


def is_inserted(unit: Unit, node: ast.AST | None) -> bool:
    """Whether `node` is such a call, or part of one, or what one has been put around."""
    if node is None:
        return False
    if isinstance(node, ast.Name) and node.id == RESERVED:
        return True
    return is_inserted_call(node) or is_inserted_call(unit.parent(node))
