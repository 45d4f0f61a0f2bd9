"""Patches of standard-library functions that add no frame.

A wrapper would be an extra frame in tracebacks and in `inspect.stack()`. So the function's lines are compiled again
with one expression replaced, at the same position of the same file, and assigned to the same function object:

    def exec_module(self, module):
        code = self.get_code(module.__name__)                                          # original
        code = _gemini(self, module.__name__, self.get_code(module.__name__))          # patched

Frames and lines are unchanged; the columns of the patched line are not shown, as tracebacks do not show the text of
frozen modules.

The program's process loads this module before the user's first statement: it imports only modules that Python has
already loaded.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FunctionType
    from typing import Any


def patch_expression(function: FunctionType, old: str, new: str, **names: Callable[..., Any]) -> bool:
    """Replace the text `old` by `new` in `function`; `names` are the globals that `new` uses.

    Return False, with no change, where the library's source is missing or differs.
    """
    code = function.__code__
    text = _text(function)
    if text is None or text.count(old) != 1:
        return False
    compiled = compile(text.replace(old, new), code.co_filename, "exec", dont_inherit=True, optimize=0)
    found = _find(compiled, code)
    if found is None or found.co_freevars != code.co_freevars or found.co_varnames != code.co_varnames:
        return False
    function.__globals__.update(names)
    function.__code__ = found
    return True


def _text(function: FunctionType) -> str | None:
    """Return the lines of `function`, at their line numbers."""
    code = function.__code__
    module = function.__globals__["__name__"].replace("_frozen_importlib_external", "importlib._bootstrap_external")
    path = os.path.join(os.path.dirname(os.__file__), *module.split(".")) + ".py"
    first = code.co_firstlineno - 1
    last = max(line for _, _, line in code.co_lines() if line is not None)
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.readlines()[first:last]
    except OSError:
        return None
    if not lines or not lines[0].lstrip().startswith(f"def {code.co_name}("):
        return None
    if lines[0].startswith("def "):
        return "\n" * first + "".join(lines)
    class_name = function.__qualname__.partition(".")[0]
    return "\n" * (first - 1) + f"class {class_name}:\n" + "".join(lines)


def _find(module: CodeType, like: CodeType) -> CodeType | None:
    """Return the code in `module` of the function that has the name and line of `like`."""
    for constant in module.co_consts:
        if isinstance(constant, type(like)):
            if constant.co_name == like.co_name and constant.co_firstlineno == like.co_firstlineno:
                return constant
            inner = _find(constant, like)
            if inner is not None:
                return inner
    return None
