"""Shard ways: which products of a forward part are divided over the shards of their stage.

A product with a weight is divided by the columns of the weight, the next one by rows: its result is a sum to be
made, an all-reduce. Rules of ops keep what lies between in pieces, attention by heads included. A column division
whose result would have to be gathered is taken back, until none is left. With `sharding_dim` every product is divided
along that dimension of its weight, whatever it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemini.tensorflow.forward_facts import ForwardFacts
from gemini.tensorflow.piece_layouts import PARTIAL, REPLICATE, Layout, Partial, Replicate, Shard
from gemini.tensorflow.rules.registry import RULES
from gemini.tensorflow.split_plan import SplitPlan, SplitRefused, check_effects, fits
from gemini.tensorflow.split_way import ForwardOp, Way, whole_way

_FLOATS = frozenset({1, 2, 14, 19})  # DT_FLOAT, DT_DOUBLE, DT_BFLOAT16, DT_HALF
_PRODUCTS = ("MatMul", "Conv2D")
_CONTRACTIONS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D")
_ROUNDS = 200


@dataclass(frozen=True)
class ShardRequest:
    """The number of shards, and the dimension of weights to divide: 0 reduction, -1 output, None: Gemini chooses."""

    shards: int
    dim: int | None = None


def plan_shards(facts: ForwardFacts, request: ShardRequest) -> SplitPlan:
    """Return how the ops run on the shards; raises SplitRefused where nothing divides."""
    undivided: set[str] = set()
    for _ in range(_ROUNDS):
        attempt = _Attempt(facts, request, undivided)
        if request.dim is not None or not attempt.gathered:
            break
        undivided |= attempt.gathered
    if not any(isinstance(layout, (Shard, Partial)) for layout in attempt.layouts.values()):
        raise SplitRefused(f"no product with a weight divides over {request.shards} shards")
    return SplitPlan((1,) * request.shards, attempt.layouts, attempt.ways, tuple(sorted(attempt.gathered)))


class _Attempt:
    """Layouts and ways with some products left whole; `gathered` are those whose results had to be gathered."""

    def __init__(self, facts: ForwardFacts, request: ShardRequest, undivided: set[str]) -> None:
        self._facts, self._request, self._undivided = facts, request, undivided
        self.layouts: dict[str, Layout] = dict.fromkeys(facts.shape_of, REPLICATE)
        self.ways: dict[str, Way] = {}
        self.gathered: set[str] = set()
        self._origins: dict[str, frozenset[str]] = {}
        for op in facts:
            if op.outputs and all(name in facts.value_of for name in op.outputs):
                self.ways[op.name] = whole_way(op)  # a constant
                continue
            given = [self.layouts[name] for name in op.inputs]
            is_divided = not all(isinstance(layout, Replicate) for layout in given)
            check_effects(op, is_divided)
            way = self._choose(op, given, is_divided)
            self._trace_origins(op, given, way)
            self.ways[op.name] = way
            self.layouts.update(zip(op.outputs, way.outputs, strict=True))

    def _choose(self, op: ForwardOp, given: Sequence[Layout], is_divided: bool) -> Way:
        way = None
        if op.type in _PRODUCTS and not any(isinstance(layout, Shard) for layout in given):
            way = self._divide_product(op)
        elif op.type == "Conv2D":
            way = _rows_of_filters(op, given[0])
        elif is_divided and not (op.type in _CONTRACTIONS and any(isinstance(one, Partial) for one in given)):
            way = RULES[op.type](op, given, self._request.shards)
        if way is None or way.row_input is not None or way.is_whole:
            return whole_way(op)
        shapes = zip((*way.inputs, *way.outputs), (*op.in_shapes, *op.out_shapes), strict=True)
        return way if all(fits(layout, shape, self._request.shards) for layout, shape in shapes) else whole_way(op)

    def _divide_product(self, op: ForwardOp) -> Way | None:
        """Divide a product of a whole input with a weight."""
        weight = op.inputs[1]
        is_weight = weight in self._facts.trained and weight not in self._facts.tainted
        if not is_weight or op.name in self._undivided or self._facts.type_of[weight] not in _FLOATS:
            return None
        if op.in_shapes[0] is None or op.in_shapes[1] is None or op.out_shapes[0] is None:
            return None
        by_rows = self._request.dim == 0
        if op.type == "Conv2D":
            return None if op.text("data_format") != "NHWC" else self._divide_filters(op, by_rows)
        left = 0 if op.flag("transpose_a") else 1
        right = 1 if op.flag("transpose_b") else 0
        if by_rows:
            return self._way(op, (left, right), None)
        return self._way(op, (None, 1 - right), 1)

    def _divide_filters(self, op: ForwardOp, by_rows: bool) -> Way | None:
        return self._way(op, (3, 2), None) if by_rows else self._way(op, (None, 3), 3)

    def _way(self, op: ForwardOp, dims: tuple[int | None, int], result: int | None) -> Way | None:
        """Return the way that divides these dimensions of the inputs; a result of None is a sum."""
        shapes = (op.in_shapes[0] or (), op.in_shapes[1] or (), op.out_shapes[0] or ())
        layouts: list[Layout] = []
        for shape, dim in zip(shapes, (*dims, result), strict=True):
            if dim is None:
                layouts.append(REPLICATE)
                continue
            if shape[dim] % self._request.shards:
                return None
            layouts.append(Shard(dim, shape[dim] // self._request.shards))
        return Way((layouts[0], layouts[1]), (PARTIAL if result is None else layouts[2],))

    def _trace_origins(self, op: ForwardOp, given: Sequence[Layout], way: Way) -> None:
        """Record the products behind each divided tensor, and those whose results this op gathers."""
        before = [self._origins.get(name, frozenset()) for name in op.inputs]
        for layout, wanted, products in zip(given, way.inputs, before, strict=True):
            if isinstance(layout, Shard) and wanted != layout:
                self.gathered |= products
        found = frozenset().union(*before)
        if op.type in _PRODUCTS and not any(isinstance(layout, Shard) for layout in given):
            found = frozenset({op.name})
        if any(isinstance(layout, Partial) for layout in way.outputs):
            if op.type not in _CONTRACTIONS and not any(isinstance(layout, Partial) for layout in given):
                self.gathered |= found  # statistics over a divided dimension: a sum for every one
            found = frozenset()
        if not all(isinstance(layout, Replicate) for layout in way.outputs):
            self._origins.update(dict.fromkeys(op.outputs, found))


def _rows_of_filters(op: ForwardOp, layout: Layout) -> Way | None:
    """Convolve divided channels with the filters of these channels: the results add up."""
    if not isinstance(layout, Shard) or layout.dim != 3 or op.text("data_format") != "NHWC":
        return None
    return Way((layout, Shard(2, layout.factor, layout.outer)), (PARTIAL,))
