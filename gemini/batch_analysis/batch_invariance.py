"""Batch invariance: sharded tensors whose contents are equal for all samples, such as an expanded token.

    cls.expand(n, 1, d)                          every row equal: period 1
    cat([cls.expand(n, 1, d), x], 1) + places    equal in part: places 0 to 1 of dimension 1
    arange(t).repeat(n, 1)                       equal; viewed as (n·t,), period t
    blank.gather(1, noise.argsort(1))            not equal, but with the same sum in every sample: shuffled

Along the samples, contents depend only on the place modulo the period. Such a tensor can be treated as samples in any
order that preserves the period, and its sum over the batch counts samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any

from gemini.batch_analysis.batch_kinds import Kind, Partial, Replicate, Shard
from gemini.batch_analysis.op_call import TensorValue, axis
from gemini.batch_analysis.rules.pointwise import NAMES

Part = tuple[int, int, int]  # dimension, start, stop


@dataclass(frozen=True)
class Invariant:
    """Contents that are equal for all samples, entirely or in part."""

    period: int = 1
    part: Part | None = None
    spread: frozenset[int] = frozenset()  # other dimensions along which they are equal
    shuffled: bool = False  # only their sum is equal


@dataclass(frozen=True)
class Permutation:
    """Indices of places along a dimension, each once: the result of argsort."""

    dim: int


Found = Invariant | Permutation | None
_PLAIN = ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
_SAME = ("to", "long", "int", "float", "double", "bool", "contiguous", "clone", "detach", "type_as")
_DRAWS = ("bernoulli", "normal", "uniform", "exponential", "log_normal", "cauchy", "geometric", "rand_like",
          "randn_like", "randint_like", "empty_like", "copy", "fill", "zero", "dropout")  # fmt: skip
_POINTWISE = frozenset({*NAMES.split(), "add", "sub", "rsub", "mul", "div", "neg", "where", "Dropout"}) - {*_DRAWS}


def find_invariance(name: str, args: Sequence[Any], kwargs: dict[str, Any], made: TensorValue) -> Found:
    """Return which part of the result of a deterministic op is equal for all samples."""
    if name in _PLAIN:
        return Invariant(spread=frozenset(range(made.rank)))
    if name in _SAME:
        return args[0].invariance if isinstance(args[0], TensorValue) else None
    if name in _POINTWISE:
        return _pointwise([*args, *kwargs.values()], made)
    handler = _HANDLERS.get(name)
    return None if handler is None or not args else handler(args, kwargs, made)


def fully_invariant(value: Any) -> Invariant | None:
    """Return the invariance of a value that is invariant as a whole, else None."""
    found = value.invariance if isinstance(value, TensorValue) else None
    return found if isinstance(found, Invariant) and found.part is None and not found.shuffled else None


def _pointwise(given: Sequence[Any], made: TensorValue) -> Found:
    values = [one for one in given if isinstance(one, TensorValue) and not one.is_constant]
    evens = [one.invariance for one in values]
    if not values or any(not isinstance(one, Invariant) or one.shuffled for one in evens):
        return None
    if any(one.rank != made.rank for one in values) or any(one.rank > made.rank for one in values):
        return None
    parts = {one.part for one in evens if one.part is not None}
    if len(parts) > 1:
        return None
    period = lcm(*(one.period for one in evens))
    return Invariant(period, next(iter(parts), None))


def _expand(args: Sequence[Any], kwargs: dict[str, Any], made: TensorValue) -> Found:  # noqa: ARG001
    value = args[0]
    if value.is_constant:
        return Invariant()
    found = fully_invariant(value)
    return None if found is None else replace(found, spread=_wider(value, made, found))


def _repeat(args: Sequence[Any], kwargs: dict[str, Any], made: TensorValue) -> Found:  # noqa: ARG001
    value = args[0]
    if not isinstance(made.kind, Shard):
        return None
    if value.is_constant:
        own = made.kind.dim - (made.rank - value.rank)
        return Invariant(value.shape[own] if own >= 0 else 1)
    found = fully_invariant(value)
    if found is None or value.kind.entries % found.period:
        return None
    return replace(found, spread=_wider(value, made, found))


def _wider(value: TensorValue, made: TensorValue, found: Invariant) -> frozenset[int]:
    """Return the dimensions along which entries are equal after some were repeated."""
    more = made.rank - value.rank
    ones = {dim + more for dim in range(value.rank) if value.shape[dim] == 1}
    return frozenset({*range(more), *ones, *(dim + more for dim in found.spread)})


def _concatenate(args: Sequence[Any], kwargs: dict[str, Any], made: TensorValue) -> Found:
    parts = [one for one in args[0] if isinstance(one, TensorValue)]
    dim = axis(kwargs.get("dim", args[1] if len(args) > 1 else 0), made.rank)
    if not isinstance(made.kind, Shard) or dim == made.kind.dim or any(part.is_constant for part in parts):
        return None
    evens = [fully_invariant(part) for part in parts]
    if all(evens):
        return Invariant(lcm(*(one.period for one in evens if one)))
    start = 0
    for part, even in zip(parts, evens, strict=True):
        if even is not None:
            return Invariant(even.period, (dim, start, start + part.shape[dim]))
        start += part.shape[dim]
    return None


def _index(args: Sequence[Any], kwargs: dict[str, Any], made: TensorValue) -> Found:  # noqa: ARG001
    value, index = args[0], args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    found = value.invariance
    if not isinstance(found, Invariant) or found.shuffled or not indexes_invariant_part(found, items, value.rank):
        return None
    return Invariant(found.period)


def indexes_invariant_part(found: Invariant, items: list[Any], rank: int) -> bool:
    """Return whether basic indices select nothing but the invariant part."""
    if any(isinstance(item, bool) or not (item is None or isinstance(item, (int, slice))) for item in items):
        return False
    if found.part is None:
        return True
    dim, start, stop = found.part
    real = [item for item in items if item is not None]
    item = real[dim] if len(real) > dim else None
    if isinstance(item, slice):
        first = 0 if item.start is None else item.start
        plain = item.step in (None, 1) and type(first) is int and type(item.stop) is int
        return plain and start <= first <= item.stop <= stop
    return type(item) is int and start <= item < stop and rank > dim


def _write(args: Sequence[Any], kwargs: dict[str, Any], made: TensorValue) -> Found:  # noqa: ARG001
    value, index, new = args
    found = fully_invariant(value)
    items = list(index) if isinstance(index, tuple) else [index]
    plain = isinstance(new, (int, float)) or (isinstance(new, TensorValue) and new.is_constant)
    if found is None or not plain or any(isinstance(item, (TensorValue, list)) for item in items):
        return None
    return Invariant(found.period)


def _permute(args: Sequence[Any], kwargs: dict[str, Any], made: TensorValue) -> Found:  # noqa: ARG001
    found = fully_invariant(args[0])
    return None if found is None else Invariant(found.period)


def _view(args: Sequence[Any], kwargs: dict[str, Any], made: TensorValue) -> Found:  # noqa: ARG001
    value = args[0]
    found = fully_invariant(value)
    if found is None or not isinstance(made.kind, Shard) or not isinstance(value.kind, Shard):
        return None
    before = range(value.kind.dim)
    if any(value.shape[dim] != 1 and dim not in found.spread for dim in before):
        return None
    every = found.period * prod(value.shape[value.kind.dim + 1 :])  # the period in entries
    behind = prod(made.shape[made.kind.dim + 1 :])
    if every % behind == 0:
        return Invariant(every // behind)
    return Invariant() if behind % every == 0 else None


def _gather(args: Sequence[Any], kwargs: dict[str, Any], made: TensorValue) -> Found:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    index = kwargs.get("index", args[2] if len(args) > 2 else None)
    found = fully_invariant(args[0])
    order = index.invariance if isinstance(index, TensorValue) else None
    if found is None or not isinstance(order, Permutation) or not isinstance(dim, int) or index.shape != args[0].shape:  # type: ignore[union-attr]
        return None
    return Invariant(found.period, shuffled=True) if axis(dim, made.rank) == order.dim else None


def _argsort(args: Sequence[Any], kwargs: dict[str, Any], made: TensorValue) -> Found:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    if not isinstance(made.kind, Shard) or type(dim) is not int or axis(dim, made.rank) == made.kind.dim:
        return None
    return Permutation(axis(dim, made.rank))


def _sum(args: Sequence[Any], kwargs: dict[str, Any], made: TensorValue) -> Found:  # noqa: ARG001
    """Return the invariance of a sum over the batch to which every sample contributes equally."""
    found, kind = args[0].invariance, args[0].kind
    if not isinstance(made.kind, Partial) or not isinstance(found, Invariant) or found.part is not None or made.rank:
        return None
    if not isinstance(kind, Shard) or kind.factor % found.period:
        return None
    return Invariant(shuffled=True)


_HANDLERS: dict[str, Callable[[Sequence[Any], dict[str, Any], TensorValue], Found]] = {
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("repeat", "tile"), _repeat),
    "cat": _concatenate,
    "getitem": _index,
    "setitem": _write,
    **dict.fromkeys(("unsqueeze", "squeeze", "transpose", "permute"), _permute),
    **dict.fromkeys(("view", "reshape", "flatten", "_unsafe_view"), _view),
    "gather": _gather,
    "argsort": _argsort,
    "sum": _sum,
}


FOLLOWED = _POINTWISE | {*_PLAIN, *_SAME, *_HANDLERS}


def align_invariant(values: Sequence[TensorValue]) -> list[TensorValue]:
    """Return the tensors, invariant ones with the batch kind of the rest."""
    varying = [value for value in values if isinstance(value.kind, Shard)]
    firm: set[Kind] = {value.kind for value in varying if fully_invariant(value) is None}
    if len({value.kind for value in varying}) < 2 or len(firm) > 1:
        return list(values)
    target: Any = next(iter(firm), varying[0].kind)
    return [replace(value, kind=target) if _fits(value, target) else value for value in values]


def _fits(value: TensorValue, kind: Shard) -> bool:
    found = fully_invariant(value)
    if found is None or isinstance(value.kind, Replicate) or not isinstance(value.kind, Shard):
        return False
    return value.kind.dim == kind.dim and value.kind.entries == kind.entries and kind.factor % found.period == 0
