"""Def-use facts of forms and expressions: which tensors they read, and the same form on other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from gemini.ir.callables import Closure, Method, Partial
from gemini.ir.pytree import Mapping, Number, Owned, Record, Ref, Sequence, Slice, refs
from gemini.ir.symint import ARITHMETIC, Expr


def tensor_reads(expr: Any) -> Iterator[Expr]:
    """Yield the parts of an expression that read a tensor."""
    if not isinstance(expr, Expr):
        return
    if expr.op not in ARITHMETIC:
        yield expr
        return
    for part in expr.operands:
        yield from tensor_reads(part)


def refs_of_read(read: Expr) -> Iterator[Ref]:
    """Yield the tensors of one read."""
    if read.op == "call":
        yield from refs(read.operands[1])
        yield from refs(read.operands[2])
    else:
        yield read.operands[0]


def rewrite_refs(form: Any, change: Callable[[Any], Any]) -> Any:
    """Return a form with every reference to a tensor (`Ref`) or an object of the model (`Owned`) replaced by `change`."""
    if isinstance(form, (Ref, Owned)):
        return change(form)
    if isinstance(form, Number):
        return Number(rewrite_refs(form.expr, change))
    if isinstance(form, Expr):
        return Expr(form.op, tuple(rewrite_refs(part, change) for part in form.operands))
    if isinstance(form, Sequence):
        return replace(form, items=tuple(rewrite_refs(part, change) for part in form.items))
    if isinstance(form, Mapping):
        return replace(form, items=_pairs(form.items, change), state=_pairs(form.state, change))
    if isinstance(form, Record):
        return replace(form, state=_pairs(form.state, change))
    if isinstance(form, Slice):
        return Slice(*(rewrite_refs(part, change) for part in (form.start, form.stop, form.step)))
    if isinstance(form, Closure):
        return replace(form, cells=_all(form.cells, change), defaults=_all(form.defaults, change))
    if isinstance(form, Partial):
        function = rewrite_refs(form.function, change)
        return Partial(function, _all(form.args, change), _pairs(form.kwargs, change))
    return Method(rewrite_refs(form.owner, change), form.name) if isinstance(form, Method) else form


def _all(forms: tuple[Any, ...], change: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(rewrite_refs(part, change) for part in forms)


def _pairs(pairs: tuple[tuple[Any, Any], ...], change: Callable[[Any], Any]) -> tuple[tuple[Any, Any], ...]:
    return tuple((key, rewrite_refs(part, change)) for key, part in pairs)
