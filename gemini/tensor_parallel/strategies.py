"""Strategies: the ways in which the shards can run a node, from the rules of its op.

A strategy lists a layout per port. Two run the node whole on every shard: with whole gradients, or with partial ones,
which a linear backward passes on. In a divided one, a replicated input has a partial gradient: each shard computes the
part that comes from its slice of the results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gemini.batch_analysis.op_call import AnalysisRefused
from gemini.tensor_parallel.layouts import (
    PARTIAL,
    PARTIAL_GRAD,
    REPLICATE,
    Layout,
    Partial,
    Replicate,
    Shard,
)
from gemini.tensor_parallel.node_ports import NodeCall, Port
from gemini.tensor_parallel.rules.registry import find_proposal
from gemini.tensor_parallel.shard_plan import SAME, DividedSize, InnerCollective
from gemini.tensor_parallel.shard_query import ShardAnswer, ask

_MOST = 6000  # combinations of layouts that are tried per node


@dataclass(frozen=True)
class Strategy:
    """Layouts of the inputs and results of a node, and how a shard runs it."""

    inputs: tuple[Layout, ...]
    results: tuple[Layout, ...]
    units: int = 0  # of the divided dimensions; 0: every shard runs the node whole
    local: str = SAME
    sizes: tuple[DividedSize, ...] = ()
    collectives: tuple[InnerCollective, ...] = ()
    mask: Shard | None = None


@dataclass(frozen=True)
class StrategySpace:
    """The layouts that are tried: units per divided dimension, and numbers of interleaved groups."""

    size: int
    units: tuple[int, ...]
    groups: tuple[int, ...] = (1,)


@dataclass
class NodeStrategies:
    """The strategies of a node; `refusal` is why none divides it."""

    found: list[Strategy] = field(default_factory=list)
    refusal: str = ""


def whole_strategies(call: NodeCall) -> list[Strategy]:
    """Return the strategies in which every shard runs the node whole."""
    whole = Strategy((REPLICATE,) * len(call.inputs), (REPLICATE,) * len(call.results))
    if not call.passes_partial or not any(port.grad for port in call.results) or call.node.kind == "input":
        return [whole]
    passed = tuple(PARTIAL_GRAD if port.grad else REPLICATE for port in call.inputs)
    return [whole, Strategy(passed, tuple(PARTIAL_GRAD if port.grad else REPLICATE for port in call.results))]


def node_strategies(call: NodeCall, space: StrategySpace) -> NodeStrategies:
    """Return all strategies of a node."""
    made = NodeStrategies(whole_strategies(call), call.refusal)
    if call.refusal or call.node.is_source or not call.inputs:
        return made
    reasons: list[str] = []
    for units in space.units:
        for layouts in _combinations(call, space, units):
            try:
                answer = ask(call.query(layouts, units))
            except AnalysisRefused as refused:
                reasons.append(str(refused))
                continue
            if (strategy := _divided(call, layouts, answer, units)) is not None:
                made.found.append(strategy)
    if len(made.found) <= 2:
        made.refusal = reasons[0] if reasons else "no dimension divides"
    return made


def _divided(call: NodeCall, layouts: Sequence[Layout], answer: ShardAnswer, units: int) -> Strategy | None:
    """Return the strategy of an answer; None where a result divides samples or rows that contents pick."""
    if any(isinstance(kind, Shard) and not port.is_divisible(kind.dim)
           for kind, port in zip(answer.kinds, call.results, strict=True)):  # fmt: skip
        return None
    written = [layout for layout, port in zip(layouts, call.inputs, strict=True) if port.key in call.node.mutates]
    if any(layout != answer.kinds[0] for layout in written):
        return None
    sizes = answer.sizes
    if call.places is not None and sizes:
        moved = dict(call.places)
        if any(size.place not in moved for size in sizes):
            return None
        sizes = tuple(DividedSize(moved[size.place], size.units) for size in sizes)
    whole = {isinstance(kind, Replicate) for kind, port in zip(answer.kinds, call.results, strict=True) if port.grad}
    if len(whole) > 1:
        return None  # the gradient of a replicated input would be whole in one part, and partial in another
    partial = whole == {False}
    inputs = tuple(
        PARTIAL_GRAD if partial and isinstance(layout, Replicate) and port.grad else layout
        for layout, port in zip(layouts, call.inputs, strict=True)
    )
    return Strategy(inputs, answer.kinds, units, answer.local, sizes, answer.collectives, answer.mask)


def _combinations(call: NodeCall, space: StrategySpace, units: int) -> Iterator[tuple[Layout, ...]]:
    """Yield layouts of all inputs of which at least one is divided."""
    if (propose := find_proposal(call.name)) is not None:
        whole = call.query((REPLICATE,) * len(call.inputs), units)
        for found in propose(whole):
            yield tuple(found.get(at, REPLICATE) for at in range(len(call.inputs)))  # type: ignore[misc]
        return
    options = [list(port_layouts(port, units, space.groups)) for port in call.inputs]
    count = 1
    for own in options:
        count *= len(own)
    if count > _MOST:  # many inputs: those of one shape have one layout
        yield from _by_shape(call, options)
        return
    for layouts in itertools.product(*options):
        if not all(isinstance(layout, Replicate) for layout in layouts):
            yield layouts


def _by_shape(call: NodeCall, options: list[list[Layout]]) -> Iterator[tuple[Layout, ...]]:
    shapes = [(port.shape, port.batch_dim, port.dynamic_dims, port.whole_dims) for port in call.inputs]
    kinds = list(dict.fromkeys(shapes))
    for layouts in itertools.islice(itertools.product(*(options[shapes.index(kind)] for kind in kinds)), _MOST):
        if not all(isinstance(layout, Replicate) for layout in layouts):
            yield tuple(layouts[kinds.index(shape)] for shape in shapes)


def port_layouts(port: Port, units: int, groups: Sequence[int]) -> Iterator[Layout]:
    """Yield the layouts that a tensor can have, but for partial gradients."""
    yield REPLICATE
    if port.dtype.is_floating_point:
        yield PARTIAL
    for dim, size in enumerate(port.shape):
        if not port.is_divisible(dim):
            continue
        for outer in groups:
            if size >= units * outer and size % (units * outer) == 0:
                yield Shard(dim, size // (units * outer), outer)


def is_divided(strategy: Strategy) -> bool:
    """Whether a shard does only a part of the work."""
    return any(isinstance(layout, (Shard, Partial)) for layout in (*strategy.inputs, *strategy.results))
