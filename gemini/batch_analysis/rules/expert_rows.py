"""Expert rows: rows of all samples sorted by expert, multiplied group by group, and restored to their order.

    ids, order = sort(expert of each row)       keys, order
    x = hidden[order // k]                      rows
    counts = histc(ids).cumsum(0)               tally, offsets
    y = grouped_mm(x, weights, counts)          rows: each times the weights of its own expert
    inverse[order] = arange(rows)               inverse
    y[inverse]                                  samples again

Each run sorts its own rows. Between the sort and its inverse a row must depend on that row alone: ops are analysed as
if every row were a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gemini.batch_analysis.batch_kinds import Kind, Replicate, SampleIndices, Shard, SortedRows
from gemini.batch_analysis.op_call import SAMPLES, AnalysisRefused, OpCall, ResultMeta, TensorValue, leaves
from gemini.batch_analysis.rules import masked_rows
from gemini.batch_analysis.rules.registry import Rule

_ROWS = ("rows", "keys")


def uses_sorted_rows(call: OpCall) -> bool:
    """Return whether an op begins a sort of rows, or runs within one."""
    if any(isinstance(value.kind, SortedRows) for value in call.tensors()):
        return True
    return call.name in ("sort", "argsort") and _sorts_rows(call)


def _sorts_rows(call: OpCall) -> bool:
    value = call.args[0] if call.args else None
    return (
        isinstance(value, TensorValue) and value.rank == 1 and isinstance(value.kind, Shard) and value.kind.outer == 1
    )


def sorted_rows_kind(call: OpCall, rule: Rule | None) -> Kind | Sequence[Kind]:
    """Return the kind of an op within a sort."""
    if call.name in ("sort", "argsort") and _sorts_rows(call):
        entries = call.sample(call.first).entries
        keys, order = (SortedRows(role, call.index, entries) for role in ("keys", "order"))
        return [keys, order] if call.name == "sort" else order
    special = _SPECIAL.get(call.name)
    found = special(call) if special is not None else None
    if found is not None:
        return found
    if rule is None:
        raise AnalysisRefused("it has no rule")
    return _by_row(call, rule)


def as_rows(values: Sequence[TensorValue]) -> SortedRows:
    """Return the sort that all of these are rows of."""
    kinds = {
        replace(v.kind, role="rows") if isinstance(v.kind, SortedRows) and v.kind.role in _ROWS else v.kind
        for v in values
    }
    if len(kinds) != 1 or not isinstance(next(iter(kinds)), SortedRows) or next(iter(kinds)).role != "rows":  # type: ignore[union-attr]
        raise AnalysisRefused("sorted rows together with something in another order")
    return next(iter(kinds))  # type: ignore[return-value]


def row_value(value: TensorValue) -> TensorValue:
    """Return rows of a sort as samples."""
    if not isinstance(value.kind, SortedRows):
        return value
    if not value.kind.entries:  # their number is unknown
        return replace(value, kind=Shard(0), shape=(SAMPLES, *value.shape[1:]), sized=0)
    return replace(value, kind=Shard(0), shape=(value.shape[0] // value.kind.entries, *value.shape[1:]), sized=0)


def row_result(result: ResultMeta, rows: SortedRows, count: int) -> ResultMeta:
    """Return a result with one row per sample, where the whole has this number of rows."""
    entries = rows.entries
    if not entries:
        if not result.shape or result.shape[0] != count:
            raise AnalysisRefused("an op that does not keep chosen rows")
        return replace(result, shape=(SAMPLES, *result.shape[1:]), batch=0)
    if result.batch != 0 or not result.shape or result.shape[0] % entries:
        raise AnalysisRefused("an op that does not keep sorted rows")
    return replace(result, shape=(result.shape[0] // entries, *result.shape[1:]))


def from_row_kind(kind: Kind, rows: SortedRows) -> Kind:
    """Return the kind in the graph of a kind found with one row per sample."""
    if kind != Shard(0):
        raise AnalysisRefused("an op that mixes sorted rows")
    return rows


def _by_row(call: OpCall, rule: Rule) -> Kind | list[Kind]:
    varying = [value for value in call.tensors() if not value.is_constant]
    rows = as_rows(varying)
    if call.random and not rows.entries:
        raise AnalysisRefused("random numbers for an unknown number of rows")
    results = [row_result(result, rows, varying[0].shape[0]) for result in call.results]
    inner = replace(call, args=_replace_rows(call.args), kwargs=_replace_rows(call.kwargs), results=results, sizes={})
    found = rule(inner)
    kinds: list[Any] = list(found) if isinstance(found, (list, tuple)) else [found]
    keeps = call.name in ("float", "to", "int", "long", "contiguous", "clone", "detach")
    keyed = keeps and isinstance(call.first.kind, SortedRows) and call.first.kind.role == "keys"
    made = [replace(rows, role="keys") if keyed else from_row_kind(kind, rows) for kind in kinds]
    return made if len(made) > 1 else made[0]


def _replace_rows(nest: Any) -> Any:
    if isinstance(nest, TensorValue):
        return row_value(nest)
    if isinstance(nest, dict):
        return {key: _replace_rows(part) for key, part in nest.items()}
    return type(nest)(_replace_rows(part) for part in nest) if type(nest) in (list, tuple) else nest


# ── the ops that make a sort ───────────────────────────────────────────────────────────────────────────────────
def _role(value: Any) -> str:
    return value.kind.role if isinstance(value, TensorValue) and isinstance(value.kind, SortedRows) else ""


def _floor_divide(call: OpCall) -> Kind | None:
    value, by = call.first, call.argument(1, "other")
    if _role(value) != "order":
        return None
    kind = value.kind
    if type(by) is not int or by < 1 or kind.divisor != 1 or kind.entries % by:  # type: ignore[union-attr]
        raise AnalysisRefused("an order of rows divided by another number than that of rows per sample")
    return replace(kind, divisor=by)  # type: ignore[arg-type]


def _getitem(call: OpCall) -> Kind | None:
    value, index = call.args
    picked = masked_rows.pick_rows(call, value, list(index) if isinstance(index, tuple) else [index])
    if picked is not None:
        return picked
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if _role(index) == "order":
        wanted = Shard(0, index.kind.entries // index.kind.divisor)
        if value.kind != wanted:
            raise AnalysisRefused("an order of rows applied to other rows")
        return replace(index.kind, role="rows", divisor=1)  # type: ignore[no-any-return]
    if _role(index) == "inverse":
        if _role(value) not in _ROWS or value.kind.order != index.kind.order:
            raise AnalysisRefused("rows restored by the order of other rows")
        return Shard(0, index.kind.entries)
    return None


def _setitem(call: OpCall) -> Kind | None:
    value, index, new = call.args
    put = masked_rows.put_rows(call, value, list(index) if isinstance(index, tuple) else [index], new)
    if put is not None:
        return put
    if _role(index) != "order":
        return None
    numbers = isinstance(new, TensorValue) and (
        (_role(new) == "numbers" and new.kind.entries == index.kind.entries)  # type: ignore[union-attr]
        or (new.kind == SampleIndices(0) and index.kind.entries == 1)
    )
    if index.kind.divisor != 1 or not numbers or value.rank != 1:
        raise AnalysisRefused("a write by the order of rows")
    return replace(index.kind, role="inverse")  # type: ignore[no-any-return]


def _histc(call: OpCall) -> Kind | None:
    value = call.first
    bins, low, high = call.argument(1, "bins"), call.argument(2, "min"), call.argument(3, "max")
    if _role(value) != "keys" or not all(type(one) is int for one in (bins, low, high)) or bins != high - low + 1:
        raise AnalysisRefused("a histogram that is not one of the sorted keys")
    return replace(value.kind, role="tally")  # type: ignore[arg-type]


def _cumsum(call: OpCall) -> Kind | None:
    if _role(call.first) != "tally":
        return None
    if call.argument(1, "dim") not in (0, -1):
        raise AnalysisRefused("a cumulative sum of counts")
    return replace(call.first.kind, role="offsets")  # type: ignore[arg-type]


def _cast(call: OpCall) -> Kind | None:
    if (kept := masked_rows.cast(call.first)) is not None:
        return kept
    return call.first.kind if _role(call.first) in ("tally", "offsets", "order", "inverse") else None


def _empty_like(call: OpCall) -> Kind | None:
    kind = call.first.kind
    return Shard(0, kind.entries) if isinstance(kind, SortedRows) and kind.role == "order" else None


def _grouped_mm(call: OpCall) -> Kind | None:
    rows, weights, offsets = call.argument(0, "input"), call.argument(1, "weight"), call.argument(2, "offs")
    if (
        (isinstance(weights, TensorValue) and not weights.is_constant)
        or _role(rows) not in _ROWS
        or _role(offsets) != "offsets"
    ):
        raise AnalysisRefused("a grouped product of something else than sorted rows")
    if rows.kind.order != offsets.kind.order or rows.kind.entries != offsets.kind.entries:
        raise AnalysisRefused("a grouped product by the counts of another sort")
    others = [
        leaf
        for leaf in leaves((call.args, call.kwargs))
        if isinstance(leaf, TensorValue) and leaf not in (rows, offsets)
    ]
    if any(not isinstance(other.kind, Replicate) for other in others):
        raise AnalysisRefused("a grouped product with a bias that depends on the batch")
    return replace(rows.kind, role="rows")  # type: ignore[no-any-return]


_SPECIAL = {
    "floor_divide": _floor_divide,
    "getitem": _getitem,
    "setitem": _setitem,
    "histc": _histc,
    "cumsum": _cumsum,
    "empty_like": _empty_like,
    "index_add": masked_rows.add_rows,
    "index_select": masked_rows.index_select_rows,
    "_grouped_mm": _grouped_mm,
    "grouped_mm": _grouped_mm,
    "grouped_mm_fallback": _grouped_mm,
    **dict.fromkeys(("to", "int", "long", "contiguous"), _cast),
}
