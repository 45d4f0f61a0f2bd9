"""Def-use facts of forms and expressions: which tensors they read, and the same form on other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from gemini.ir.callables import ClosureForm, MethodForm, PartialForm
from gemini.ir.pytree import MappingForm, ModelObject, Number, ObjectForm, Ref, SequenceForm, SliceForm, refs
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


def rewrite_refs(form: Any, change: Callable[[Any], Any], number: Callable[[Number], Any] | None = None) -> Any:
    """Return a form in which `change` has replaced every `Ref` and every `ModelObject`.

    `number` replaces traced numbers as a whole; without it, the references in them are replaced.
    """

    def again(part: Any) -> Any:
        return rewrite_refs(part, change, number)

    if isinstance(form, (Ref, ModelObject)):
        return change(form)
    if isinstance(form, Number):
        return Number(again(form.expr)) if number is None else number(form)
    if isinstance(form, Expr):
        return Expr(form.op, tuple(again(part) for part in form.operands))
    if isinstance(form, SequenceForm):
        return replace(form, items=tuple(again(part) for part in form.items))
    if isinstance(form, MappingForm):
        return replace(form, items=_pairs(form.items, again), state=_pairs(form.state, again))
    if isinstance(form, ObjectForm):
        return replace(form, state=_pairs(form.state, again))
    if isinstance(form, SliceForm):
        return SliceForm(*(again(part) for part in (form.start, form.stop, form.step)))
    if isinstance(form, ClosureForm):
        return replace(form, cells=tuple(map(again, form.cells)), defaults=tuple(map(again, form.defaults)))
    if isinstance(form, PartialForm):
        return PartialForm(again(form.function), tuple(map(again, form.args)), _pairs(form.kwargs, again))
    return MethodForm(again(form.owner), form.name) if isinstance(form, MethodForm) else form


def _pairs(pairs: tuple[tuple[Any, Any], ...], again: Callable[[Any], Any]) -> tuple[tuple[Any, Any], ...]:
    return tuple((key, again(part)) for key, part in pairs)
