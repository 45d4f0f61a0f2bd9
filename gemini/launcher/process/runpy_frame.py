"""The frame that ``python -m`` has below the user's: the standard library's own, with our statement in it.

``python -m module`` calls `runpy._run_module_as_main`, which finds the module and calls `_run_code`. Called from code
of ours, that function would have one frame too many below it. So its syntax tree is taken from the standard library
and compiled anew as the program itself: same file name, function name, lines, columns and local variables.

    def _run_module_as_main():                 # the arguments become constants
        exec(boot)                             # + ours, first
        mod_name, alter_argv = "pkg", True     # +
        try:                                   # +
            …the library's own statements…     # its globals are spelled __import__("runpy").name
        finally:
            keep_main_file()                   # +
"""

from __future__ import annotations

import ast
import builtins
import os
import runpy
from types import CodeType
from typing import TYPE_CHECKING

from gemini.launcher.process.pyc_pack import place, prologue

if TYPE_CHECKING:
    from gemini.launcher.process.bootstrap import Plan

_FUNCTION = "_run_module_as_main"
_LAST = """
try: __import__("sys").modules["gemini.launcher.process.bootstrap"].keep_main_file()
except Exception: pass
"""


def module_code(name: str, alter_argv: bool, plan: Plan, frozen: bool = True) -> CodeType:
    """The code of a program that runs module `name` as `runpy` does; `frozen` where the library is."""
    path = os.path.join(os.path.dirname(os.__file__), "runpy.py")
    with open(path, "rb") as file:
        tree = ast.parse(file.read())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == _FUNCTION)
    bound = f"{function.args.args[0].arg}, {function.args.args[1].arg} = {name!r}, {alter_argv!r}"
    ours = [prologue(plan), *ast.parse(bound).body]
    last = ast.parse(_LAST).body
    for statement in [*ours, *last]:
        place(statement, function.lineno)
    local = set(runpy._run_module_as_main.__code__.co_varnames)  # type: ignore[attr-defined]
    guarded = ast.Try([_Qualified(local).visit(node) for node in function.body[1:]], [], [], last)
    ast.copy_location(guarded, ours[0])
    function.args = ast.arguments([], [], None, [], [], None, [])
    function.body = [*ours, guarded]
    ast.fix_missing_locations(function)
    filename = runpy._run_module_as_main.__code__.co_filename if frozen else path  # type: ignore[attr-defined]
    module = compile(ast.Module([function], []), filename, "exec", dont_inherit=True)
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


class _Qualified(ast.NodeTransformer):
    """Spells the library's global names so that they are found from any module."""

    def __init__(self, local: set[str]) -> None:
        self._local = local

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self._local or hasattr(builtins, node.id):
            return node
        module = ast.parse("__import__('runpy')", mode="eval").body
        for part in ast.walk(module):
            if "lineno" in part._attributes:
                ast.copy_location(part, node)
        return ast.copy_location(ast.Attribute(module, node.id, node.ctx), node)
