"""Split plan: how every forward op runs on the micro-batches of one batch shape.

Layouts propagate from the sources: those whose leading dimension is the batch are divided, and every op keeps pieces
where its rule proves it. An op that cannot runs once on the whole batch. An op without a rule, or with effects, refuses
the whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gemini.tensorflow.forward_facts import VARIANT, ForwardFacts, drawing_region
from gemini.tensorflow.piece_layouts import REPLICATE, Layout, Replicate, Shape, Shard, divide
from gemini.tensorflow.rules.registry import GUARDS, RANDOM, RULES, SAMPLERS, STATEFUL
from gemini.tensorflow.split_way import ForwardOp, Way, whole_way

_SAME_ROWS = ("Reshape", "Identity", "Cast", "ExpandDims", "Squeeze")


class SplitRefused(Exception):
    """The step runs on the untouched graph; the text is the reason."""


@dataclass(frozen=True)
class SplitPlan:
    """The layouts of all tensors, the ways of all ops, and the units of every piece."""

    sizes: tuple[int, ...]
    layout_of: dict[str, Layout]
    way_of: dict[str, Way]
    joined: tuple[str, ...] = field(default=())
    """Ops with divided inputs that run once on the whole batch."""
    untouched: frozenset[str] = frozenset()
    """Ops that are those of the untouched graph."""

    @property
    def units(self) -> int:
        """The samples of the whole batch."""
        return sum(self.sizes)

    @property
    def count(self) -> int:
        """The number of micro-batches."""
        return len(self.sizes)


@dataclass(frozen=True)
class BatchSource:
    """A tensor that a step takes in: its shape in this step, and the one that the script declared."""

    shape: Shape
    declared: Sequence[int | None] | None = None
    votes: bool = True  # whether its leading dimension says what the batch is

    @property
    def batch_dim(self) -> int | None:
        """The first dimension that was declared as unknown, else the first one."""
        if not self.shape:
            return None
        unknown = [dim for dim, size in enumerate(self.declared or ()) if size is None]
        return unknown[0] if unknown else 0


def batch_size(sources: Mapping[str, BatchSource]) -> int:
    """Return the most frequent batch dimension of the sources; 1 where none has any."""
    sizes = Counter(one.shape[one.batch_dim] for one in sources.values() if one.votes and one.batch_dim is not None)
    return max(sizes, key=lambda size: (sizes[size], size)) if sizes else 1


def plan_split(facts: ForwardFacts, sources: Mapping[str, BatchSource], micro_batches: int) -> SplitPlan:
    """Return how the ops run on at most so many micro-batches; raises SplitRefused."""
    size = batch_size(sources)
    sizes = divide(size, max(1, min(micro_batches, size)))
    layouts: dict[str, Layout] = dict.fromkeys(sources, REPLICATE)
    if len(sizes) > 1:
        for name, source in sources.items():
            if source.batch_dim is not None and source.shape[source.batch_dim] == size:
                layouts[name] = Shard(source.batch_dim)
    ways: dict[str, Way] = {}
    joined = []
    makers = {name: op for op in facts for name in op.outputs}
    untouched = untouched_ops(facts)
    for op in facts:
        given = [REPLICATE if op.name in untouched else layouts[name] for name in op.inputs]
        is_divided = not all(isinstance(layout, Replicate) for layout in given)
        way = _choose_way(op, given, size, makers, layouts) if is_divided else whole_way(op)
        check_effects(op, is_divided)
        if way.is_whole and is_divided:
            joined.append(op.name)
        ways[op.name] = way
        layouts.update(zip(op.outputs, way.outputs, strict=True))
    return SplitPlan(sizes, layouts, ways, tuple(joined), untouched)


def untouched_ops(facts: ForwardFacts) -> frozenset[str]:
    """Return the loops and branches that draw random numbers, with all that they depend on."""
    random = {op.name for op in facts if RANDOM & {*op.inner}}
    makers = {name: op.name for op in facts for name in op.outputs}
    variants = {name for name in makers if facts.type_of.get(name) == VARIANT}
    return frozenset(drawing_region([(op.name, op.inputs) for op in facts], random, makers, variants))


def check_effects(op: ForwardOp, is_divided: bool) -> None:
    """Raise SplitRefused for an op without a rule, or with effects."""
    if is_divided and op.type not in RULES.keys() | SAMPLERS:
        raise SplitRefused(f"no rule for {op.type} ({op.name})")
    if op.is_stateful and op.type not in STATEFUL | RANDOM:
        raise SplitRefused(f"{op.type} ({op.name}) may have effects")
    for kind in op.inner:
        if kind not in STATEFUL | GUARDS | RANDOM:
            raise SplitRefused(f"{kind} inside {op.name} may have effects")
    if op.type in RANDOM - SAMPLERS and op.inputs and op.values[0] is None:
        raise SplitRefused(f"the size of the random numbers of {op.name} depends on data")
    if "_gradient_op_type" in op.attributes and op.text("_gradient_op_type").startswith("CustomGradient"):
        raise SplitRefused(f"{op.name} has a gradient of its own, a Python function")


def _choose_way(
    op: ForwardOp, given: list[Layout], units: int, makers: Mapping[str, ForwardOp], layouts: Mapping[str, Layout]
) -> Way:  # fmt: skip
    if op.type in RANDOM:
        return whole_way(op)
    rule = RULES.get(op.type)
    way = rule(op, given) if rule is not None else None
    if way is None:
        return whole_way(op)
    if way.row_input is not None and not _counts_rows(op, way, units, makers, layouts):
        return whole_way(op)
    shapes = zip((*way.inputs, *way.outputs), (*op.in_shapes, *op.out_shapes), strict=True)
    return way if all(fits(layout, shape, units) for layout, shape in shapes) else whole_way(op)


def fits(layout: Layout, shape: Shape | None, units: int) -> bool:
    """Whether a tensor of this shape has the layout."""
    if not isinstance(layout, Shard):
        return True
    return shape is not None and layout.dim < len(shape) and shape[layout.dim] == layout.outer * units * layout.factor


def _counts_rows(
    op: ForwardOp, way: Way, units: int, makers: Mapping[str, ForwardOp], layouts: Mapping[str, Layout]
) -> bool:  # fmt: skip
    """Whether the indices of a sample start at the first of its rows: they add `sample × rows per sample`.

    A piece then subtracts its first row; an index beyond its rows is an error of the op, never another row.
    """
    table = way.inputs[0]
    name = op.inputs[way.row_input or 0]
    while (maker := makers.get(name)) is not None and maker.type in _SAME_ROWS:
        name = maker.inputs[0]
    layout = layouts.get(name)
    if maker is None or maker.type not in ("Add", "AddV2") or not isinstance(layout, Shard):
        return False
    shape = maker.out_shapes[0]
    if shape is None or not isinstance(table, Shard) or layout.outer != 1:
        return False
    sizes = [1] * len(shape)
    sizes[layout.dim] = shape[layout.dim]
    expected = (np.arange(units) * table.factor).repeat(layout.factor).reshape(sizes)
    known = [value for value in maker.values if value is not None]
    return any(np.array_equal(np.broadcast_to(value, shape), np.broadcast_to(expected, shape)) for value in known)
