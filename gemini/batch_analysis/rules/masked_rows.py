"""Chosen rows: those that a mask selects, of all samples together, processed and returned to their places.

    slot, row = torch.where(mask)           places: each run has those of its own samples
    x = hidden[row]                         rows
    y = expert(x) * weights[row, slot, None]      rows
    out.index_add_(0, row, y)               samples again

Their number depends on contents, and nothing may depend on it. A row must depend on that row alone: ops are analysed
as if every row were a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemini.batch_analysis.batch_kinds import Kind, Shard, SortedRows
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, TensorValue
from gemini.batch_analysis.op_call import axis as axis_of

_PLACE = "place"


@dataclass(frozen=True)
class RowChoice:
    """A selection: by which step or mask, and how the mask is sharded."""

    by: Any
    kind: Shard


def is_chosen(value: Any) -> bool:
    """Return whether a value is rows, or places, of a choice."""
    return (
        isinstance(value, TensorValue)
        and isinstance(value.kind, SortedRows)
        and isinstance(value.kind.order, RowChoice)
    )


def _place(value: Any) -> int | None:
    """Return the dimension of the mask that places index."""
    if not is_chosen(value) or not value.kind.role.startswith(_PLACE):
        return None
    return int(value.kind.role.removeprefix(_PLACE))


def places(call: OpCall) -> list[Kind]:
    """`where(mask)`: a list of places for every dimension of the mask."""
    mask = call.kwargs["condition"] if "condition" in call.kwargs else call.first  # noqa: SIM401
    if not call.traced or len(call.results) != mask.rank:
        raise AnalysisRefused("where() of a condition alone: how many places there are depends on contents")
    choice = RowChoice(call.index, call.sample(mask))
    return [SortedRows(f"{_PLACE}{dim}", choice, 0) for dim in range(mask.rank)]


def rows_of(choice: RowChoice) -> SortedRows:
    """Return the kind of rows of a choice."""
    return SortedRows("rows", choice, 0)


def _own(value: TensorValue, item: Any, dim: int) -> RowChoice:
    """Return the choice, if places index the rows that a tensor has in a dimension, sample by sample."""
    choice = item.kind.order
    kind = choice.kind
    if value.kind != Shard(dim, kind.factor, kind.outer) or _place(item) != kind.dim:
        raise AnalysisRefused("rows picked by the places of other rows")
    return choice  # type: ignore[no-any-return]


def pick_rows(call: OpCall, value: TensorValue, items: list[Any]) -> Kind | None:
    """Handle `value[places]`: one row per place; None if no item is one."""
    chosen = [item for item in items if is_chosen(item)]
    if not chosen:
        return None
    tensors = [item for item in items if isinstance(item, TensorValue)]
    count = len(tensors)
    adjacent = all(isinstance(item, TensorValue) for item in items[:count])
    if len(chosen) != count or not adjacent or any(item.rank != 1 or _place(item) is None for item in chosen):
        raise AnalysisRefused("rows picked together with something else")
    if any(item is not None and item != slice(None) for item in items[count:]):
        raise AnalysisRefused("rows picked together with something else")
    choice = chosen[0].kind.order
    if any(item.kind.order != choice for item in chosen):
        raise AnalysisRefused("rows picked by places of two choices")
    if value.is_constant:  # a place in another dimension belongs to the row
        if any(_place(item) == choice.kind.dim for item in chosen):
            raise AnalysisRefused("indexing a constant by numbers of samples")
        return rows_of(choice)
    dim = call.sample(value).dim
    if dim >= count:
        raise AnalysisRefused("rows picked by the places of other rows")
    return rows_of(_own(value, chosen[dim], dim))


def put_rows(call: OpCall, value: TensorValue, items: list[Any], new: Any) -> Kind | None:
    """Handle `value[places] = new`: every row its own, or one number for all."""
    if not any(is_chosen(item) for item in items):
        return None
    rows = pick_rows(call, value, items)
    if value.is_constant or (isinstance(new, TensorValue) and not new.is_constant and new.kind != rows):
        raise AnalysisRefused("writing to the places of a choice")
    if isinstance(new, TensorValue) and new.is_constant and new.rank:
        raise AnalysisRefused("writing to the places of a choice")
    call.constant(new if not isinstance(new, TensorValue) else None)
    return value.kind


def add_rows(call: OpCall) -> Kind | None:
    """Handle `index_add(x, dim, places, rows)`: every row returns to its place."""
    value, dim, index, rows = (call.argument(at, name) for at, name in enumerate(("input", "dim", "index", "source")))
    if not is_chosen(index) and not is_chosen(rows):
        return None
    if not is_chosen(index) or axis_of(dim, value.rank) != 0 or not isinstance(rows, TensorValue):
        raise AnalysisRefused(f"{call.name} of rows of a choice")
    choice = _own(value, index, 0)
    if rows.kind != rows_of(choice):
        raise AnalysisRefused(f"{call.name} of rows of a choice to the places of another")
    call.constant(call.kwargs.get("alpha"))
    return value.kind  # type: ignore[no-any-return]


def index_select_rows(call: OpCall) -> Kind | None:
    """`index_select(x, 0, places)`."""
    value, dim, index = call.first, call.argument(1, "dim"), call.argument(2, "index")
    if not is_chosen(index):
        return None
    if axis_of(dim, value.rank) != 0:
        raise AnalysisRefused("rows picked along another dimension")
    return pick_rows(call, value, [index])


def cast(value: Any) -> Kind | None:
    """Keep places under a cast to another integer type."""
    return value.kind if _place(value) is not None else None
