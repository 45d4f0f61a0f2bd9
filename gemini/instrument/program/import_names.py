"""The modules that a file names in its imports, read from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_BY_CALL = {"import_module", "__import__"}


def imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """The absolute names of all that may be a module in the imports of `tree`, in the order they stand, each once.

    ``from a import b`` gives ``a`` and ``a.b``, as `b` may be a module; relative names are relative to `package`, and
    are left out where that has no such parent. Imports count wherever they stand, in functions and conditions too.
    """
    seen: set[str] = set()
    for node in _in_order(tree):
        for name in _names(node, package):
            if name not in seen:
                seen.add(name)
                yield name


def absolute(name: str, level: int, package: str) -> str | None:
    """The absolute form of a name with `level` leading dots, seen from `package`; None where there is none."""
    if not level:
        return name or None
    parents = package.split(".") if package else []
    if level > len(parents):
        return None
    base = ".".join(parents[: len(parents) - level + 1])
    return f"{base}.{name}" if name else base


def _in_order(tree: ast.Module) -> Iterator[ast.AST]:
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(list(ast.iter_child_nodes(node))))


def _names(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = absolute(node.module or "", node.level, package)
        if base is not None:
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
    elif isinstance(node, ast.Call):
        name = _named_in_call(node, package)
        if name is not None:
            yield name


def _named_in_call(call: ast.Call, package: str) -> str | None:
    """The module of ``importlib.import_module("literal")`` and the like."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in _BY_CALL or not call.args or not isinstance(call.args[0], ast.Constant):
        return None
    name = call.args[0].value
    if not isinstance(name, str) or not name.replace(".", "_").isidentifier():
        return None
    given = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "package")]
    if function == "import_module" and given and isinstance(given[0], ast.Constant):
        package = str(given[0].value)
    bare = name.lstrip(".")
    return absolute(bare, len(name) - len(bare), package)
