"""Shard ways: which products of a forward part are divided over the shards of their stage.

A product with a weight is divided by the columns of the weight, the next one by rows: its result is a sum to be
made, an all-reduce. Rules of ops keep what lies between in pieces, attention by heads included. A column division
whose result would have to be gathered is taken back, until none is left. With `sharding_dim` every product is divided
along that dimension of its weight, whatever it costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gemini.tensorflow.forward_facts import ForwardFacts
from gemini.tensorflow.piece_layouts import PARTIAL, REPLICATE, Layout, Partial, Replicate, Shard
from gemini.tensorflow.rules.layer_ops import product_letters
from gemini.tensorflow.rules.registry import RULES
from gemini.tensorflow.split_plan import SplitPlan, SplitRefused, check_effects, fits, untouched_ops
from gemini.tensorflow.split_way import ForwardOp, Way, whole_way

_FLOATS = frozenset({1, 2, 14, 19})  # DT_FLOAT, DT_DOUBLE, DT_BFLOAT16, DT_HALF
_PRODUCTS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D")
_ROUNDS = 200
NOTHING: Mapping[str, Shard] = {}


@dataclass(frozen=True)
class ShardRequest:
    """The number of shards, and the dimension of weights to divide: 0 reduction, -1 output, None: Gemini chooses."""

    shards: int
    dim: int | None = None


def plan_shards(facts: ForwardFacts, request: ShardRequest, stored: Mapping[str, Shard] = NOTHING) -> SplitPlan:
    """Return how the ops run on the shards; `stored` has reads of variables that exist in shards.

    Raises SplitRefused where nothing divides.
    """
    undivided: set[str] = set()
    for _ in range(_ROUNDS):
        attempt = _Attempt(facts, request, undivided, stored)
        if request.dim is not None or not attempt.gathered:
            break
        undivided |= attempt.gathered
    if not any(isinstance(layout, (Shard, Partial)) for layout in attempt.layouts.values()):
        raise SplitRefused(f"no product with a weight divides over {request.shards} shards")
    return SplitPlan(
        (1,) * request.shards, attempt.layouts, attempt.ways, tuple(sorted(attempt.gathered)), attempt.untouched
    )


class _Attempt:
    """Layouts and ways with some products left whole; `gathered` are those whose results had to be gathered."""

    def __init__(
        self, facts: ForwardFacts, request: ShardRequest, undivided: set[str], stored: Mapping[str, Shard]
    ) -> None:
        self._facts, self._request, self._undivided = facts, request, undivided
        self.layouts: dict[str, Layout] = dict.fromkeys(facts.shape_of, REPLICATE)
        self.ways: dict[str, Way] = {}
        self.gathered: set[str] = set()
        self._origins: dict[str, frozenset[str]] = {}
        self.untouched = untouched_ops(facts)
        for op in facts:
            if op.outputs and all(name in facts.value_of for name in op.outputs):
                self.ways[op.name] = whole_way(op)  # a constant
                continue
            if op.name in self.untouched:
                check_effects(op, is_divided=False)
                self.ways[op.name] = whole_way(op)
                continue
            given = [self.layouts[name] for name in op.inputs]
            is_divided = not all(isinstance(layout, Replicate) for layout in given)
            check_effects(op, is_divided)
            way = self._choose(op, given, is_divided)
            self._trace_origins(op, given, way)
            self.ways[op.name] = way
            self.layouts.update(zip(op.outputs, way.outputs, strict=True))
            self.layouts.update((name, stored[name]) for name in op.outputs if name in stored)

    def _choose(self, op: ForwardOp, given: Sequence[Layout], is_divided: bool) -> Way:
        way = None
        if op.type in _PRODUCTS and not any(isinstance(layout, Shard) for layout in given):
            way = self._divide_product(op)
        elif is_divided and not (op.type in _PRODUCTS and any(isinstance(one, Partial) for one in given)):
            way = RULES[op.type](op, given)
        if way is None or way.row_input is not None or way.is_whole:
            return whole_way(op)
        if op.name in self._undivided and not isinstance(given[0], Shard):
            return whole_way(op)
        shapes = zip((*way.inputs, *way.outputs), (*op.in_shapes, *op.out_shapes), strict=True)
        return way if all(fits(layout, shape, self._request.shards) for layout, shape in shapes) else whole_way(op)

    def _divide_product(self, op: ForwardOp) -> Way | None:
        """Divide a product of a whole input with a weight."""
        if not self._has_weight(op) or op.name in self._undivided:
            return None
        letters = product_letters(op)
        if letters is None or any(shape is None for shape in (*op.in_shapes, *op.out_shapes)):
            return None
        left, right, result = (one or "" for one in (*letters.inputs, *letters.outputs))
        names = right.replace(".", "")
        if any(one.count(letter) > 1 for one in (left, right, result) for letter in names):
            return None
        if self._request.dim == 0:
            inner = (label for label in names if label in left and label not in result)
            ways = (self._way(op, (left.index(label), right.index(label)), None) for label in inner)
        else:
            outer = (label for label in names if label in result and label not in left)
            ways = (self._way(op, (None, right.index(label)), result.index(label)) for label in outer)
        return next((way for way in ways if way is not None), None)

    def _has_weight(self, op: ForwardOp) -> bool:
        if op.type not in _PRODUCTS or len(op.inputs) != 2:
            return False
        weight, facts = op.inputs[1], self._facts
        return weight in facts.trained and weight not in facts.tainted and facts.type_of[weight] in _FLOATS

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
        if self._has_weight(op) and not isinstance(given[0], Shard):
            found = frozenset({op.name})
        if any(isinstance(layout, Partial) for layout in way.outputs):
            if op.type not in _PRODUCTS and not any(isinstance(layout, Partial) for layout in given):
                self.gathered |= found  # statistics over a divided dimension: a sum for every one
            found = frozenset()
        if not all(isinstance(layout, Replicate) for layout in way.outputs):
            self._origins.update(dict.fromkeys(op.outputs, found))
