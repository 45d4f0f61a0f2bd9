"""Experts: rows of all samples sorted by expert, multiplied group by group, and put back in their order.

    ids, order = sort(expert of each row)       keys, order
    x = hidden[order // k]                      rows
    counts = histc(ids).cumsum(0)               tally, offsets
    y = grouped_mm(x, weights, counts)          rows: each times the weights of its own expert
    inverse[order] = arange(rows)               inverse
    y[inverse]                                  samples again

Each run sorts its own rows. What happens to a row in between must depend on that row alone: ops are judged as if every
row were a sample of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gemini.batch_analysis.batch_kinds import Arranged, Kind, Positions, Replicate, Shard
from gemini.batch_analysis.op_call import SAMPLES, Call, Refused, Result, Value, leaves
from gemini.batch_analysis.rules import masked_rows
from gemini.batch_analysis.rules.registry import Rule

_ROWS = ("rows", "keys")


def concerns_order(call: Call) -> bool:
    """Whether an op begins a sort of rows, or works within one."""
    if any(isinstance(value.kind, Arranged) for value in call.tensors()):
        return True
    return call.name in ("sort", "argsort") and _sorts_rows(call)


def _sorts_rows(call: Call) -> bool:
    value = call.args[0] if call.args else None
    return isinstance(value, Value) and value.rank == 1 and isinstance(value.kind, Shard) and value.kind.outer == 1


def arranged(call: Call, rule: Rule | None) -> Kind | Sequence[Kind]:
    """The kind of an op within a sort."""
    if call.name in ("sort", "argsort") and _sorts_rows(call):
        entries = call.sample(call.first).entries
        keys, order = (Arranged(role, call.index, entries) for role in ("keys", "order"))
        return [keys, order] if call.name == "sort" else order
    special = _SPECIAL.get(call.name)
    found = special(call) if special is not None else None
    if found is not None:
        return found
    if rule is None:
        raise Refused("no rule says what it does with samples")
    return _by_row(call, rule)


def as_rows(values: Sequence[Value]) -> Arranged:
    """The sort that all of these are rows of."""
    kinds = {
        replace(v.kind, role="rows") if isinstance(v.kind, Arranged) and v.kind.role in _ROWS else v.kind
        for v in values
    }
    if len(kinds) != 1 or not isinstance(next(iter(kinds)), Arranged) or next(iter(kinds)).role != "rows":  # type: ignore[union-attr]
        raise Refused("sorted rows together with something in another order")
    return next(iter(kinds))  # type: ignore[return-value]


def row_value(value: Value) -> Value:
    """Rows of a sort as samples."""
    if not isinstance(value.kind, Arranged):
        return value
    if not value.kind.entries:  # how many there are is not known
        return replace(value, kind=Shard(0), shape=(SAMPLES, *value.shape[1:]), sized=0)
    return replace(value, kind=Shard(0), shape=(value.shape[0] // value.kind.entries, *value.shape[1:]), sized=0)


def row_result(result: Result, rows: Arranged, count: int) -> Result:
    """A result with a row a sample, where the whole has so many."""
    entries = rows.entries
    if not entries:
        if not result.shape or result.shape[0] != count:
            raise Refused("an op that does not keep chosen rows")
        return replace(result, shape=(SAMPLES, *result.shape[1:]), batch=0)
    if result.batch != 0 or not result.shape or result.shape[0] % entries:
        raise Refused("an op that does not keep sorted rows")
    return replace(result, shape=(result.shape[0] // entries, *result.shape[1:]))


def back(kind: Kind, rows: Arranged) -> Kind:
    """A kind found with a row a sample."""
    if kind != Shard(0):
        raise Refused("an op that mixes sorted rows")
    return rows


def _by_row(call: Call, rule: Rule) -> Kind | list[Kind]:
    varying = [value for value in call.tensors() if not value.is_constant]
    rows = as_rows(varying)
    if call.random and not rows.entries:
        raise Refused("random numbers for rows of which nobody knows how many there are")
    results = [row_result(result, rows, varying[0].shape[0]) for result in call.results]
    inner = replace(call, args=_replaced(call.args), kwargs=_replaced(call.kwargs), results=results, sizes={})
    found = rule(inner)
    kinds: list[Any] = list(found) if isinstance(found, (list, tuple)) else [found]
    keeps = call.name in ("float", "to", "int", "long", "contiguous", "clone", "detach")
    keyed = keeps and isinstance(call.first.kind, Arranged) and call.first.kind.role == "keys"
    made = [replace(rows, role="keys") if keyed else back(kind, rows) for kind in kinds]
    return made if len(made) > 1 else made[0]


def _replaced(nest: Any) -> Any:
    if isinstance(nest, Value):
        return row_value(nest)
    if isinstance(nest, dict):
        return {key: _replaced(part) for key, part in nest.items()}
    return type(nest)(_replaced(part) for part in nest) if type(nest) in (list, tuple) else nest


# ── the ops that make a sort ───────────────────────────────────────────────────────────────────────────────────
def _role(value: Any) -> str:
    return value.kind.role if isinstance(value, Value) and isinstance(value.kind, Arranged) else ""


def _floor_divide(call: Call) -> Kind | None:
    value, by = call.first, call.given(1, "other")
    if _role(value) != "order":
        return None
    kind = value.kind
    if type(by) is not int or by < 1 or kind.divisor != 1 or kind.entries % by:  # type: ignore[union-attr]
        raise Refused("an order of rows divided by another number than that of rows a sample")
    return replace(kind, divisor=by)  # type: ignore[arg-type]


def _getitem(call: Call) -> Kind | None:
    value, index = call.args
    picked = masked_rows.picked(call, value, list(index) if isinstance(index, tuple) else [index])
    if picked is not None:
        return picked
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if _role(index) == "order":
        wanted = Shard(0, index.kind.entries // index.kind.divisor)
        if value.kind != wanted:
            raise Refused("an order of rows applied to others")
        return replace(index.kind, role="rows", divisor=1)  # type: ignore[no-any-return]
    if _role(index) == "inverse":
        if _role(value) not in _ROWS or value.kind.order != index.kind.order:
            raise Refused("rows put back in the order of others")
        return Shard(0, index.kind.entries)
    return None


def _setitem(call: Call) -> Kind | None:
    value, index, new = call.args
    put = masked_rows.put(call, value, list(index) if isinstance(index, tuple) else [index], new)
    if put is not None:
        return put
    if _role(index) != "order":
        return None
    numbers = isinstance(new, Value) and (
        (_role(new) == "numbers" and new.kind.entries == index.kind.entries)  # type: ignore[union-attr]
        or (new.kind == Positions(0) and index.kind.entries == 1)
    )
    if index.kind.divisor != 1 or not numbers or value.rank != 1:
        raise Refused("a write by the order of rows")
    return replace(index.kind, role="inverse")  # type: ignore[no-any-return]


def _histc(call: Call) -> Kind | None:
    value = call.first
    bins, low, high = call.given(1, "bins"), call.given(2, "min"), call.given(3, "max")
    if _role(value) != "keys" or not all(type(one) is int for one in (bins, low, high)) or bins != high - low + 1:
        raise Refused("a histogram that is not one of the sorted keys")
    return replace(value.kind, role="tally")  # type: ignore[arg-type]


def _cumsum(call: Call) -> Kind | None:
    if _role(call.first) != "tally":
        return None
    if call.given(1, "dim") not in (0, -1):
        raise Refused("a cumulative sum of counts")
    return replace(call.first.kind, role="offsets")  # type: ignore[arg-type]


def _cast(call: Call) -> Kind | None:
    if (kept := masked_rows.cast(call.first)) is not None:
        return kept
    return call.first.kind if _role(call.first) in ("tally", "offsets", "order", "inverse") else None


def _empty_like(call: Call) -> Kind | None:
    kind = call.first.kind
    return Shard(0, kind.entries) if isinstance(kind, Arranged) and kind.role == "order" else None


def _grouped(call: Call) -> Kind | None:
    rows, weights, offsets = call.given(0, "input"), call.given(1, "weight"), call.given(2, "offs")
    if (
        (isinstance(weights, Value) and not weights.is_constant)
        or _role(rows) not in _ROWS
        or _role(offsets) != "offsets"
    ):
        raise Refused("a grouped product of something else than sorted rows")
    if rows.kind.order != offsets.kind.order or rows.kind.entries != offsets.kind.entries:
        raise Refused("a grouped product by the counts of another sort")
    others = [
        leaf for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, Value) and leaf not in (rows, offsets)
    ]
    if any(not isinstance(other.kind, Replicate) for other in others):
        raise Refused("a grouped product with a bias that depends on the batch")
    return replace(rows.kind, role="rows")  # type: ignore[no-any-return]


_SPECIAL = {
    "floor_divide": _floor_divide,
    "getitem": _getitem,
    "setitem": _setitem,
    "histc": _histc,
    "cumsum": _cumsum,
    "empty_like": _empty_like,
    "index_add": masked_rows.added,
    "index_select": masked_rows.selected_rows,
    "_grouped_mm": _grouped,
    "grouped_mm": _grouped,
    "grouped_mm_fallback": _grouped,
    **dict.fromkeys(("to", "int", "long", "contiguous"), _cast),
}
