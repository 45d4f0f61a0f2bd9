"""The modules that a file names in its imports, read from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_BY_CALL = {"import_module", "__import__"}


def find_imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the absolute names of possible modules in the imports of `tree`, in order, each once.

    ``from a import b`` yields ``a`` and ``a.b``, as `b` may be a module; relative names are relative to `package`, and
    omitted where it has no such parent. Imports in functions and conditions count too.
    """
    seen: set[str] = set()
    for node in _in_order(tree):
        for name in _names(node, package):
            if name not in seen:
                seen.add(name)
                yield name


def absolute(name: str, level: int, package: str) -> str | None:
    """Return the absolute form of a name with `level` leading dots in `package`; None without such a parent."""
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
        name = _module_of_call(node, package)
        if name is not None:
            yield name


def _module_of_call(call: ast.Call, package: str) -> str | None:
    """Return the module of ``importlib.import_module("literal")`` or ``__import__``."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in _BY_CALL or not call.args or not isinstance(call.args[0], ast.Constant):
        return None
    name = call.args[0].value
    if not isinstance(name, str) or not name.replace(".", "_").isidentifier():
        return None
    packages = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "package")]
    if function == "import_module" and packages and isinstance(packages[0], ast.Constant):
        package = str(packages[0].value)
    bare = name.lstrip(".")
    return absolute(bare, len(name) - len(bare), package)
