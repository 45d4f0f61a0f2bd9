"""Op text: torch functions in the notation of a model (`x + y`, `x.view(…)`, `F.linear(…)`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence as SequenceType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional
from torch._jit_internal import boolean_dispatched

from gemini.codegen.attribute_paths import is_name
from gemini.codegen.expression_text import (
    AND,
    COMPARE,
    OR,
    PLUS,
    POWER,
    SHIFT,
    TIMES,
    UNARY,
    XOR,
    Text,
    infix,
    subscript,
)
from gemini.ir.op_targets import find_op
from gemini.ir.pytree import Literal, Number, Ref

if TYPE_CHECKING:
    from gemini.codegen.expressions import Expressions

# Only functions that the operator itself calls, so that the text runs the recorded function.
INFIX = {
    "add": ("+", PLUS), "sub": ("-", PLUS), "mul": ("*", TIMES), "div": ("/", TIMES), "true_divide": ("/", TIMES),
    "__floordiv__": ("//", TIMES), "remainder": ("%", TIMES), "__mod__": ("%", TIMES), "matmul": ("@", TIMES),
    "__matmul__": ("@", TIMES), "pow": ("**", POWER), "__pow__": ("**", POWER), "__and__": ("&", AND),
    "__or__": ("|", OR), "__xor__": ("^", XOR), "__lshift__": ("<<", SHIFT), "__rshift__": (">>", SHIFT),
    "eq": ("==", COMPARE), "ne": ("!=", COMPARE), "lt": ("<", COMPARE), "le": ("<=", COMPARE), "gt": (">", COMPARE),
    "ge": (">=", COMPARE), "__eq__": ("==", COMPARE), "__ne__": ("!=", COMPARE), "__lt__": ("<", COMPARE),
    "__le__": ("<=", COMPARE), "__gt__": (">", COMPARE), "__ge__": (">=", COMPARE), "__add__": ("+", PLUS),
    "__sub__": ("-", PLUS), "__mul__": ("*", TIMES), "__truediv__": ("/", TIMES),
}  # fmt: skip
REFLECTED = {
    "__radd__": ("+", PLUS), "__rsub__": ("-", PLUS), "__rmul__": ("*", TIMES), "__rtruediv__": ("/", TIMES),
    "__rdiv__": ("/", TIMES), "__rfloordiv__": ("//", TIMES), "__rpow__": ("**", POWER), "__rmatmul__": ("@", TIMES),
    "__rmod__": ("%", TIMES), "__rand__": ("&", AND), "__ror__": ("|", OR), "__rxor__": ("^", XOR),
}  # fmt: skip
PREFIX = {"neg": "-", "__neg__": "-", "__pos__": "+", "positive": "+", "__invert__": "~"}
TENSOR = "torch.Tensor."


def operation(write: Expressions, name: str, args: SequenceType[Any], kwargs: Any) -> Text:
    """Return the text of a call of a torch function."""
    if name.startswith(TENSOR) and args and isinstance(args[0], Ref):
        short = name.removeprefix(TENSOR)
        found = _operator(write, short, args) if not kwargs else None
        if found is not None:
            return found
        if short.endswith(".__get__") and len(args) <= 2 and not kwargs:
            return Text(f"{write.form(args[0]).owner}.{short.removesuffix('.__get__')}")
        if is_name(short) and not short.startswith("__"):
            return _call_text(f"{write.form(args[0]).owner}.{short}", write.arguments(args[1:], kwargs))
    return _call_text(function_text(write, name), write.arguments(args, _needed_keywords(name, kwargs)))


def _operator(write: Expressions, short: str, args: SequenceType[Any]) -> Text | None:
    if len(args) == 1 and short in PREFIX:
        return Text(f"{PREFIX[short]}{write.form(args[0]).at(UNARY)}", UNARY)
    if len(args) != 2:
        return None
    if short == "__getitem__":
        return Text(subscript(write.form(args[0]).owner, write.index(args[1])))
    if short in INFIX and _is_operand(args[1]):
        sign, binds = INFIX[short]
        return infix(write.form(args[0]), sign, write.form(args[1]), binds)
    if short in REFLECTED and _is_operand(args[1]) and not isinstance(args[1], Ref):
        sign, binds = REFLECTED[short]
        return infix(write.form(args[1]), sign, write.form(args[0]), binds)
    return None


def _is_operand(form: Any) -> bool:
    """Return whether a form can stand beside an operator: a tensor or a number."""
    if isinstance(form, Literal):
        return isinstance(form.value, (int, float, complex)) and not isinstance(form.value, bool)
    return isinstance(form, (Ref, Number))


@functools.lru_cache(maxsize=1024)
def _defaults(name: str) -> dict[str, Any]:
    """Return the defaults of a torch function that is written in Python."""
    function: Any = find_op(name)
    function = boolean_dispatched.get(function, {}).get("if_false", function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}


def _needed_keywords(name: str, kwargs: Any) -> Any:
    """Return the keywords that differ from the function's defaults."""
    defaults = _defaults(name) if kwargs and name.startswith("torch.nn.functional.") else {}
    return tuple(
        (key, form)
        for key, form in kwargs
        if not (isinstance(form, Literal) and key in defaults and _equal(form.value, defaults[key]))
    )


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def function_text(write: Expressions, name: str) -> str:
    """Return how a torch function is reached, by its shortest public name."""
    function, short = find_op(name), name.rpartition(".")[2]
    if getattr(torch.nn.functional, short, None) is function and (
        name.startswith("torch.nn.functional.") or getattr(torch, short, None) is not function
    ):
        return f"{write.imports.alias('torch.nn.functional', 'F')}.{short}"
    if getattr(torch, short, None) is function:
        return f"torch.{short}"
    parts = name.split(".")
    found: Any = torch
    for at, part in enumerate(parts[1:], 1):
        if parts[0] != "torch" or not hasattr(found, part):
            module = ".".join(parts[:-1]) if at == len(parts) - 1 else name.rpartition(".")[0]
            return write.imports.name(module, short)
        found = getattr(found, part)
    return name


def _call_text(function: str, arguments: list[str]) -> Text:
    return Text(f"{function}({', '.join(arguments)})")


def statement(write: Expressions, name: str, args: SequenceType[Any], kwargs: Any) -> str | None:
    """Return the text of a function that is a Python statement: an assignment to an item or to a property."""
    if not name.startswith(TENSOR) or kwargs or not args or not isinstance(args[0], Ref):
        return None
    short = name.removeprefix(TENSOR)
    if short == "__setitem__" and len(args) == 3:
        return f"{subscript(write.form(args[0]).owner, write.index(args[1]))} = {write.form(args[2])}"
    if short.endswith(".__set__") and len(args) == 2:
        return f"{write.form(args[0]).owner}.{short.removesuffix('.__set__')} = {write.form(args[1])}"
    return None


def returns_first(name: str) -> bool:
    """Return whether a function returns its first argument, changed."""
    short = name.removeprefix(TENSOR)
    return name.startswith(TENSOR) and "." not in short and short.endswith("_") and not short.endswith("__")
