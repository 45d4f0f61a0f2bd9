"""The `runpy` frame of ``python -m``, with the boot statement in it.

``python -m module`` calls `runpy._run_module_as_main`, which finds the module and calls `_run_code`. A call of that
function by Gemini would add a frame below it. So its syntax tree is taken from the standard library and compiled as the
program: same file name, function name, lines, columns and local variables.

    def _run_module_as_main():                 # the arguments become constants
        exec(boot)                             # + the boot statement
        mod_name, alter_argv = "pkg", True     # +
        try:                                   # +
            …the library's statements…         # its globals become __import__("runpy").name
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

from gemini.launcher.process.pyc_pack import boot_statement, set_position

if TYPE_CHECKING:
    from gemini.launcher.process.bootstrap import BootPlan

_FUNCTION = "_run_module_as_main"
_LAST = """
try: __import__("sys").modules["gemini.launcher.process.bootstrap"].keep_main_file()
except Exception: pass
"""


def compile_module_frame(name: str, alter_argv: bool, plan: BootPlan, frozen: bool = True) -> CodeType:
    """Return the code of a program that runs module `name` as `runpy` does; `frozen` if the library is frozen."""
    path = os.path.join(os.path.dirname(os.__file__), "runpy.py")
    with open(path, "rb") as file:
        tree = ast.parse(file.read())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == _FUNCTION)
    bound = f"{function.args.args[0].arg}, {function.args.args[1].arg} = {name!r}, {alter_argv!r}"
    first = [boot_statement(plan), *ast.parse(bound).body]
    last = ast.parse(_LAST).body
    for statement in [*first, *last]:
        set_position(statement, function.lineno)
    local = set(runpy._run_module_as_main.__code__.co_varnames)  # type: ignore[attr-defined]
    guarded = ast.Try([_Qualified(local).visit(node) for node in function.body[1:]], [], [], last)
    ast.copy_location(guarded, first[0])
    function.args = ast.arguments([], [], None, [], [], None, [])
    function.body = [*first, guarded]
    ast.fix_missing_locations(function)
    filename = runpy._run_module_as_main.__code__.co_filename if frozen else path  # type: ignore[attr-defined]
    module = compile(ast.Module([function], []), filename, "exec", dont_inherit=True)
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


class _Qualified(ast.NodeTransformer):
    """Qualifies the library's global names so that they resolve in any module."""

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
