"""Divided sizes: numbers among the arguments of a node that are those of the shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gemini.errors import ShardingError
from gemini.ir.node import EMPTY_KWARGS, Node
from gemini.ir.pytree import Literal, Number, Path, SequenceForm
from gemini.ir.symint import Expr

SHARD_SIZE = "gemini.collectives.value_moves.shard_size"


def divide_size(args: Any, kwargs: Any, place: Path, units: int, node: Node) -> tuple[Any, Any]:
    """Return arguments in which the number at a place is that of the shard."""
    (kind, key), *rest = place

    def divided(form: Any) -> Any:
        if isinstance(form, Literal) and (type(form.value) is not int or form.value < 0):
            return form
        if not isinstance(form, (Literal, Number)):
            raise ShardingError(f"{node.name}: the number at {place} is none")
        call = (SHARD_SIZE, SequenceForm(tuple, (form, Literal(units))), EMPTY_KWARGS)
        return Number(Expr("call", call))

    def change(form: Any, steps: list[tuple[str, Any]]) -> Any:
        if not steps:
            return divided(form)
        (_, at), *more = steps
        items = list(form.items)
        items[at] = change(items[at], more)
        return replace(form, items=tuple(items))

    if kind == "i":
        return change(args, [(kind, key), *rest]), kwargs
    items = tuple((name, change(form, list(rest)) if name == key else form) for name, form in kwargs.items)
    return args, replace(kwargs, items=items)
