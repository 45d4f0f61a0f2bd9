"""Code dependencies: functions and classes of user modules that generated stage code imports, for a worker.

Workers do not import modules of the script, since that would run them again. The objects that the code imports from
them travel by value, and the worker executes the code with stub modules that hold these objects.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from gemini.user_code import is_user_module

UserObjects = dict[str, dict[str, Any]]


def collect_user_objects(texts: Iterable[str]) -> UserObjects:
    """Return the objects that these source texts import from user modules, by module and name."""
    found: UserObjects = {}
    for text in texts:
        tree = ast.parse(text)
        aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and is_user_module(node.module):
                _add(found, node.module, [alias.name for alias in node.names])
            elif isinstance(node, ast.Import):
                aliases |= {one.asname or one.name: one.name for one in node.names if is_user_module(one.name)}
        for node in ast.walk(tree) if aliases else ():
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases:
                _add(found, aliases[ast.unparse(node.value)], [node.attr])
    return found


def _add(found: UserObjects, module: str, names: list[str]) -> None:
    held = vars(sys.modules[module])
    found.setdefault(module, {}).update({name: held[name] for name in names if name in held})


@contextmanager
def stub_modules(objects_by_module: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Replace modules of these names by stubs that hold these objects, for a while."""
    before = {name: sys.modules.get(name) for name in objects_by_module}
    for name, objects in objects_by_module.items():
        stub = ModuleType(name)
        vars(stub).update({**vars(before[name] or stub), **objects})
        sys.modules[name] = stub
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
