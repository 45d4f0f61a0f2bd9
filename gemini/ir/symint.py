"""Traced numbers: Python ints and floats with the expression that they were computed by.

A size read from a tensor (`x.shape[0]`), an element count or an `.item()` is ordinary Python data to the model, and
would become a constant of the graph, right on the captured batch and wrong on every other. So the tracer returns
subclasses of `int` and `float` that carry an expression:

    b, t = x.shape              TracedInt(8, size(x, 0)), TracedInt(10, size(x, 1))
    y.view(b * t, -1)           recorded as view(y, mul(size(x, 0), size(x, 1)), -1)

Arithmetic builds expressions. A comparison decides a branch of the model's Python, so its outcome is recorded as a
guard. Each conversion to a plain number (`int()`, `math.sqrt`, indexing) records a guard on its value. Reads by C code
that bypass these methods (`math.cos(f)`, `items[:n]`) are detected by comparing the traces of two batch sizes, and by
traces in which C code sees another number (`gemini.capture.hidden_size_reads`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Expr:
    """`op(*operands)`; operands are numbers, expressions, or references to a node's value."""

    op: str
    operands: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.operands))})"


class GuardLog(Protocol):
    """Receives the facts about traced numbers that the model's Python depends on."""

    disguise: Callable[[Any, Expr], Any] | None  # the number that C code sees instead of the value

    def on_hash(self, expr: Expr) -> None:
        """Record that a traced number was looked up in a table."""

    def on_compare(self, expr: Expr, outcome: bool) -> None:
        """Record a comparison that the model's Python branched on."""

    def on_concretize(self, expr: Expr, value: int | float) -> None:
        """Record that a traced number became a plain one."""


# Every operation an expression may name, beside the reads of a tensor ("size", "numel", "item", …).
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "truediv": operator.truediv,
    "mod": operator.mod,
    "pow": operator.pow,
    "neg": operator.neg,
    "abs": abs,
    "ceil": math.ceil,
    "floor": math.floor,
    "round": round,
    "trunc": math.trunc,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "bool": bool,
}
_BINARY = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow")
_UNARY = ("neg", "abs", "ceil", "floor", "trunc")
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_OPAQUE_BINARY = ("and", "or", "xor", "lshift", "rshift", "divmod")


def to_plain(value: Any) -> Any:
    """Return the plain number of a traced one; any other value unchanged."""
    return value.plain if isinstance(value, (TracedInt, TracedFloat)) else value


def make_traced(value: int | float, expr: Expr, log: GuardLog) -> Any:
    """Return a traced number; booleans cannot be subclassed and stay plain."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return TracedInt(value, expr, log) if isinstance(value, int) else TracedFloat(value, expr, log)


class TracedInt(int):
    """An int with its expression."""

    expr: Expr
    log: GuardLog
    plain: int

    def __new__(cls, value: int, expr: Expr, log: GuardLog) -> TracedInt:
        """Make the number and attach its expression."""
        number = int.__new__(cls, value if log.disguise is None else log.disguise(value, expr))
        number.expr, number.log, number.plain = expr, log, value
        return number

    def __reduce__(self) -> Any:
        return (int, (self.plain,))

    def __deepcopy__(self, memo: Any) -> int:
        return self.plain

    def __repr__(self) -> str:
        return int.__repr__(self)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(int.__int__(self), spec)


class TracedFloat(float):
    """A float with its expression."""

    expr: Expr
    log: GuardLog
    plain: float

    def __new__(cls, value: float, expr: Expr, log: GuardLog) -> TracedFloat:
        """Make the number and attach its expression."""
        number = float.__new__(cls, value if log.disguise is None else log.disguise(value, expr))
        number.expr, number.log, number.plain = expr, log, value
        return number

    def __reduce__(self) -> Any:
        return (float, (self.plain,))

    def __deepcopy__(self, memo: Any) -> float:
        return self.plain

    def __repr__(self) -> str:
        return float.__repr__(self)

    __str__ = __repr__


def operand(value: Any) -> Any:
    """Return the operand for a number in an expression."""
    return value.expr if isinstance(value, (TracedInt, TracedFloat)) else value


def _binary(op: str, reflected: bool) -> Callable[[Any, Any], Any]:
    compute = ARITHMETIC[op]

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        left, right = (other, self) if reflected else (self, other)
        value = compute(to_plain(left), to_plain(right))
        return make_traced(value, Expr(op, (operand(left), operand(right))), self.log)

    return method


def _unary(op: str) -> Callable[[Any], Any]:
    compute = ARITHMETIC[op]

    def method(self: Any) -> Any:
        return make_traced(compute(to_plain(self)), Expr(op, (self.expr,)), self.log)

    return method


def _compare(op: str) -> Callable[[Any, Any], Any]:
    compute = ARITHMETIC[op]

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        outcome = bool(compute(to_plain(self), to_plain(other)))
        self.log.on_compare(Expr(op, (self.expr, operand(other))), outcome)
        return outcome

    return method


def _concretize(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        self.log.on_concretize(self.expr, to_plain(self))
        return convert(to_plain(self))

    return method


def _opaque_binary(op: str, reflected: bool) -> Callable[[Any, Any], Any]:
    name = f"__{'r' if reflected else ''}{op}__"

    def method(self: Any, other: Any) -> Any:
        self.log.on_concretize(self.expr, to_plain(self))
        return getattr(to_plain(self), name)(to_plain(other))

    return method


def _round(self: Any, digits: int | None = None) -> Any:
    if digits is not None:
        self.log.on_concretize(self.expr, to_plain(self))
        return round(to_plain(self), digits)
    return make_traced(round(to_plain(self)), Expr("round", (self.expr,)), self.log)


def _hash(self: Any) -> int:
    self.log.on_hash(self.expr)
    return hash(to_plain(self))


def _truth(self: Any) -> bool:
    self.log.on_compare(Expr("bool", (self.expr,)), bool(to_plain(self)))
    return bool(to_plain(self))


def _install(cls: type, concrete: type) -> None:
    for op in _BINARY:
        setattr(cls, f"__{op}__", _binary(op, reflected=False))
        setattr(cls, f"__r{op}__", _binary(op, reflected=True))
    for op in _UNARY:
        setattr(cls, f"__{op}__", _unary(op))
    for op in _COMPARE:
        setattr(cls, f"__{op}__", _compare(op))
    setattr(cls, "__hash__", _hash)  # noqa: B010 - defining __eq__ removed it
    setattr(cls, "__bool__", _truth)  # noqa: B010
    setattr(cls, "__round__", _round)  # noqa: B010
    setattr(cls, "__int__", _concretize(int))  # noqa: B010
    setattr(cls, "__float__", _concretize(float))  # noqa: B010
    for op in _OPAQUE_BINARY:
        if hasattr(concrete, f"__{op}__"):
            setattr(cls, f"__{op}__", _opaque_binary(op, reflected=False))
            setattr(cls, f"__r{op}__", _opaque_binary(op, reflected=True))


_install(TracedInt, int)
_install(TracedFloat, float)
setattr(TracedInt, "__index__", _concretize(int))  # noqa: B010


def evaluate(expr: Any, read: Callable[[Expr], Any]) -> Any:
    """Return the value of an expression; `read` evaluates the operations that read a tensor."""
    if not isinstance(expr, Expr):
        return expr
    compute = ARITHMETIC.get(expr.op)
    if compute is None:
        return read(expr)
    return compute(*(evaluate(part, read) for part in expr.operands))
