"""Recurrent layers by hidden units: every shard computes its units in each step, and gathers those of the others.

weights (gates * hidden, inputs)   rows of the shard's units in every gate
h                                  whole in every step: one all-gather forward, one reduce-scatter backward; the two
                                   directions of a layer share it, and the next layer reads the same whole values
c, results                         slices
projections (projected, hidden)    columns: h is a sum, with one all-reduce per step each way

Both ops are `(x, states, weights, mode, …)`, as in `gemini.collectives.recurrent_ops`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gemini.batch_analysis.batch_kinds import Kind, Replicate, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, TensorValue
from gemini.tensor_parallel.layouts import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from gemini.tensor_parallel.rules.registry import proposes_layouts, shard_rule
from gemini.tensor_parallel.shard_plan import DIVIDED_RECURRENCE, InnerCollective
from gemini.tensor_parallel.shard_query import ShardQuery

_GATES = {"LSTM": 4, "GRU": 3}


@proposes_layouts("recurrent_layer", "recurrent_cell")
def unit_layouts(call: ShardQuery) -> Iterator[Mapping[Any, Kind]]:
    """Yield the layouts of the arguments that are divided, by key; the state c may be whole."""
    gates, hidden = _gates_and_units(call)
    factor, rest = divmod(hidden, call.samples)
    if rest:
        return
    found: dict[Any, Kind] = {
        one.key: Shard(1, factor) if _is_projection(call, one) else Shard(0, factor, gates) for one in call.args[2]
    }
    states = call.args[1]
    if isinstance(states, (tuple, list)) and states[0].key != states[1].key:
        yield {**found, states[1].key: Shard(states[1].rank - 1, factor)}
    yield found


@shard_rule("recurrent_layer", "recurrent_cell")
def recurrence(call: ShardQuery) -> list[Kind]:
    """All layers and directions, or one step of a cell."""
    is_cell = call.name == "recurrent_cell"
    if call.first.rank != (2 if is_cell else 3):
        raise AnalysisRefused("a recurrent layer without samples")
    divided = {value.key: value.kind for value in call.tensors() if value.kind != Replicate()}
    if divided not in list(unit_layouts(call)):
        raise AnalysisRefused("a recurrent layer of other dimensions than hidden units")
    call.local = DIVIDED_RECURRENCE
    directions = 2 if not is_cell and call.args[8] else 1
    kinds: list[Kind] = []
    for at, result in enumerate(call.results):
        outer = directions if at == 0 else 1
        factor, rest = divmod(result.shape[-1], call.samples * outer)
        if rest:
            raise AnalysisRefused(f"a recurrent layer with {result.shape[-1]} results per step, which do not divide")
        kinds.append(Shard(len(result.shape) - 1, factor, outer))
    if not is_cell:
        _add_collectives(call, directions)
    return kinds


def _gates_and_units(call: ShardQuery) -> tuple[int, int]:
    gates = _GATES.get(call.args[3], 1)
    return gates, call.args[2][0].shape[0] // gates


def _is_projection(call: ShardQuery, weight: TensorValue) -> bool:
    gates, hidden = _gates_and_units(call)
    return weight.shape[0] != gates * hidden


def _add_collectives(call: ShardQuery, directions: int) -> None:
    """Add those of all steps; the last step of the last layer needs none, unless its result is a sum."""
    steps, samples = call.first.shape[:2] if not call.args[9] else reversed(call.first.shape[:2])
    projections = [one for one in call.args[2] if _is_projection(call, one)]
    width = projections[0].shape[0] if projections else _gates_and_units(call)[1]
    size = samples * directions * width * call.first.dtype.itemsize
    times = call.args[4] * steps - (not projections)
    names = (ALL_REDUCE, ALL_REDUCE) if projections else (ALL_GATHER, REDUCE_SCATTER)
    if times > 0:
        call.collectives.append(InnerCollective(names[0], size, "forward", times))
        if call.out().grad:
            call.collectives.append(InnerCollective(names[1], size, "backward", times))
