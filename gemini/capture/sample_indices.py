"""Sample indices: subscripts that select samples, and the same subscripts for later samples.

x[i]   x[i, :5]   x[3 * i : 3 * (i + 1)]   of sample i
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemini.ir.pytree import Literal, Ref, SequenceForm, SliceForm
from gemini.ir.symint import Expr


def is_shifted(one: Any, other: Any, place: tuple[int, int, int], times: int) -> bool:
    """Return whether `other` selects the entries of a dimension `times` micro-batches after those of `one`.

    `place` is the dimension, the rank, and the entries per micro-batch: `one` must select in the first micro-batch.
    Other parts of the subscripts are not compared.
    """
    dim, rank, rows = place
    places = list(_places(one, rank))
    if dim not in places or places != list(_places(other, rank)):
        return False
    at = places.index(dim)
    return _is_behind(_parts(one)[at], _parts(other)[at], times * rows, rows)


def other_parts(subscript: Any, dim: int, rank: int) -> list[Any]:
    """Return the parts of a subscript that index other dimensions."""
    places = list(_places(subscript, rank))
    return [part for part, place in zip(_parts(subscript), places, strict=True) if place != dim]


def _parts(subscript: Any) -> tuple[Any, ...]:
    if isinstance(subscript, SequenceForm) and subscript.cls is tuple:
        return subscript.items
    return (subscript,)


def _places(subscript: Any, rank: int) -> Iterator[int]:
    """Yield the dimension that each part of a subscript indexes; -1 for none or unknown."""
    parts = _parts(subscript)
    counted = [isinstance(part, SliceForm) or _is_number(part) for part in parts]
    plain = [
        counts or (isinstance(part, Literal) and _is_plain(part.value))
        for part, counts in zip(parts, counted, strict=True)
    ]
    at = 0
    for index, (part, counts) in enumerate(zip(parts, counted, strict=True)):
        if not plain[index] or (isinstance(part, Literal) and part.value is Ellipsis and not all(plain)):
            yield from [-1] * (len(parts) - index)  # a tensor, a list, a mask: its dimensions are unknown
            return
        if counts:
            yield at
            at += 1
        else:
            yield -1
            if isinstance(part, Literal) and part.value is Ellipsis:
                at += rank - sum(counted)


def _is_plain(value: Any) -> bool:
    return value is None or value is Ellipsis or (isinstance(value, int) and not isinstance(value, bool))


def _is_number(part: Any) -> bool:
    return isinstance(part, Literal) and isinstance(part.value, int) and not isinstance(part.value, bool)


def _is_behind(one: Any, other: Any, step: int, rows: int) -> bool:
    if _is_number(one) and _is_number(other):
        return 0 <= one.value < rows and bool(other.value == one.value + step)
    if not isinstance(one, SliceForm) or not isinstance(other, SliceForm) or one.step != other.step:
        return False
    first = 0 if one.start == Literal(None) else _number(one.start)
    bounds = [first, *(_number(bound) for bound in (one.stop, other.start, other.stop))]
    if any(bound is None for bound in bounds) or isinstance(one.step, (Ref, Expr)):
        return False
    start, stop, later, end = bounds
    return bool(0 <= start <= stop <= rows and later == start + step and end == stop + step)


def _number(bound: Any) -> Any:
    return bound.value if _is_number(bound) else None
