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


def rewrite_refs(form: Any, change: Callable[[Any], Any]) -> Any:
    """Return a form in which `change` has replaced every `Ref` and every `ModelObject`."""
    if isinstance(form, (Ref, ModelObject)):
        return change(form)
    if isinstance(form, Number):
        return Number(rewrite_refs(form.expr, change))
    if isinstance(form, Expr):
        return Expr(form.op, tuple(rewrite_refs(part, change) for part in form.operands))
    if isinstance(form, SequenceForm):
        return replace(form, items=tuple(rewrite_refs(part, change) for part in form.items))
    if isinstance(form, MappingForm):
        return replace(form, items=_pairs(form.items, change), state=_pairs(form.state, change))
    if isinstance(form, ObjectForm):
        return replace(form, state=_pairs(form.state, change))
    if isinstance(form, SliceForm):
        return SliceForm(*(rewrite_refs(part, change) for part in (form.start, form.stop, form.step)))
    if isinstance(form, ClosureForm):
        return replace(form, cells=_all(form.cells, change), defaults=_all(form.defaults, change))
    if isinstance(form, PartialForm):
        function = rewrite_refs(form.function, change)
        return PartialForm(function, _all(form.args, change), _pairs(form.kwargs, change))
    return MethodForm(rewrite_refs(form.owner, change), form.name) if isinstance(form, MethodForm) else form


def _all(forms: tuple[Any, ...], change: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(rewrite_refs(part, change) for part in forms)


def _pairs(pairs: tuple[tuple[Any, Any], ...], change: Callable[[Any], Any]) -> tuple[tuple[Any, Any], ...]:
    return tuple((key, rewrite_refs(part, change)) for key, part in pairs)
