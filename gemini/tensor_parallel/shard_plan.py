"""Shard plan: how the shards of a stage hold every value, and how each of them runs every node.

A value is *produced* in one layout, and its readers *want* it in one or several. Each version that a reader wants is
made once from the produced one, by a `Move`; a version with partial gradients also serves the readers that want
`Replicate`, without a collective:

    node 7 ──produces Partial──►  move ──► PartialGrad ──► node 9, node 10
                                               └── move ──► Replicate ──► node 12

A plan covers a whole graph, or some of its nodes (one stage of a pipeline). It is valid for the shapes of its graph;
only the batch dimension, which no layout divides, may have another size.

**Sizes.** Plain numbers and traced numbers (`ir.symint`) among the arguments of a node always mean sizes of whole
values: a traced size that is read from a value held in slices is the size of the whole value. A `DividedSize` names a
number that must be that of the shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any

from gemini.errors import ArtifactError
from gemini.ir.codec import Reader, Writer
from gemini.ir.pytree import Path, Ref
from gemini.tensor_parallel.layouts import (
    ALL_REDUCE,
    REPLICATE,
    Layout,
    PartialGrad,
    Replicate,
    Shard,
    conversions,
    layout_text,
    move_collectives,
    read_layout,
    unit_count,
    unit_range,
    wire_bytes,
    write_layout,
)

VERSION = 1

SAME = ""  # the op or module itself, on the parts of the shard
VOCABULARY_EMBEDDING = "vocabulary embedding"
VOCABULARY_CROSS_ENTROPY = "vocabulary cross entropy"
DIVIDED_HEADS = "divided heads"
DIVIDED_RECURRENCE = "divided recurrence"
LOCAL_OPS = {
    SAME: "the op or module of the node, on the parts of the shard",
    VOCABULARY_EMBEDDING: "rows of the shard's slice of the table, zeros for the ids of other shards; a sum",
    DIVIDED_HEADS: "multi-head attention with the shard's heads; a sum",
    DIVIDED_RECURRENCE: "a recurrent layer or cell with the shard's hidden units; h is gathered in every step",
    VOCABULARY_CROSS_ENTROPY: "the loss of logits whose classes are divided: equal on all shards",
}


@dataclass(frozen=True)
class DividedSize:
    """A number of a node that counts entries of a divided dimension: `units` units, of which a shard has its range.

    `place` leads to it: `("i", 1), …` in the positional arguments, `("k", "size"), …` in those by name, or
    `("a", "num_heads")` an attribute of the module of the node.
    """

    place: Path
    units: int

    def local(self, whole: int, count: int, shard: int) -> int:
        """Return the number for a shard; `whole` is a multiple of `units`."""
        start, stop = unit_range(self.units, count, shard)
        return whole // self.units * (stop - start)


@dataclass(frozen=True)
class InnerCollective:
    """Collectives inside a local op: `times` over a whole value of `size` bytes, in `phase` (forward or backward)."""

    name: str
    size: int
    phase: str = "forward"
    times: int = 1


@dataclass(frozen=True)
class NodeShards:
    """One node: the layouts it wants and produces, and the local op that each shard runs.

    Source nodes (inputs, parameters and buffers of the graph) are listed, too, with the layout of their output.
    `inputs` lists every tensor that it reads, once, in the order of `Node.inputs()`; those of which it reads only a
    size are listed in the layout in which they are produced. `parameters` lists the tensors of the model that a module
    node reads, by name in the model. `mask` is the slice of the whole batch's random numbers that a random node uses.
    """

    node: int
    inputs: tuple[tuple[Ref, Layout], ...] = ()
    outputs: tuple[tuple[Ref, Layout], ...] = ()
    parameters: tuple[tuple[str, Layout], ...] = ()
    local: str = SAME
    sizes: tuple[DividedSize, ...] = ()
    mask: Shard | None = None
    collectives: tuple[InnerCollective, ...] = ()

    @property
    def is_replicated(self) -> bool:
        """Whether every shard runs the node whole."""
        layouts = (layout for _, layout in (*self.inputs, *self.outputs, *self.parameters))
        return self.local == SAME and all(isinstance(layout, (Replicate, PartialGrad)) for layout in layouts)


@dataclass(frozen=True)
class TensorShards:
    """A parameter or buffer: one layout for all its names, in which it is stored and its gradient accumulated.

    `names` are all names in the model, the first as in `named_parameters()`.
    """

    names: tuple[str, ...]
    layout: Layout
    shape: tuple[int, ...]
    bytes: int
    trainable: bool = True
    is_read: bool = True  # by some node of the graph

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    def shard_bytes(self, count: int, shard: int = 0) -> int:
        """Return the bytes that a shard holds."""
        if not isinstance(self.layout, Shard) or not self.bytes:
            return self.bytes
        units = unit_count(self.layout, self.shape[self.layout.dim])
        start, stop = unit_range(units, count, shard)
        return self.bytes // units * (stop - start)


@dataclass(frozen=True)
class Move:
    """A conversion of a value, or of a parameter named `tensor`, that is made once for all its readers."""

    ref: Ref | None
    tensor: str
    have: Layout
    want: Layout
    readers: tuple[int, ...]  # node ids; none: only the result of the plan
    bytes: int  # of the whole value
    grad: bool = True  # the value has a gradient

    @property
    def collectives(self) -> tuple[str, str]:
        """The collectives forward and backward, "" for none."""
        return move_collectives(self.have, self.want, self.grad)

    def __str__(self) -> str:
        return f"{self.tensor or self.ref}: {layout_text(self.have)} → {layout_text(self.want)}"


@dataclass(frozen=True)
class PlannedCollective:
    """A collective of the step: over a whole value of `size` bytes, of which each shard sends `wire`."""

    name: str
    phase: str  # "forward", "backward", or "step": once after the last backward
    size: int
    wire: float
    node: int  # the first reader, or the node of a local op
    what: str  # the value, parameter or local op


@dataclass(frozen=True)
class ReplicatedOp:
    """An op that every shard runs whole, and the time that division would save per step."""

    node: int
    name: str
    reason: str
    ms: float


@dataclass(frozen=True)
class ShardPlan:
    """The layouts of a graph, or of some of its nodes, on `size` shards.

    `inputs` are the values that arrive (inputs of the graph, values of earlier stages), in the layout in which they
    arrive; `results` the values that leave, in the layout in which they leave. Results may stay divided until they are
    read. `bytes` and `grads` tell the size of a value and whether it has a gradient.
    """

    size: int
    model: str
    nodes: tuple[NodeShards, ...]
    tensors: tuple[TensorShards, ...] = ()
    inputs: tuple[tuple[Ref, Layout], ...] = ()
    results: tuple[tuple[Ref, Layout], ...] = ()
    bytes: tuple[tuple[Ref, int], ...] = ()
    grads: frozenset[Ref] = frozenset()
    replicated: tuple[ReplicatedOp, ...] = ()
    facts: Mapping[str, float] = field(default_factory=dict, compare=False)

    # ── look-up ────────────────────────────────────────────────────────────────────────────────────────────────────
    @cached_property
    def _by_node(self) -> dict[int, NodeShards]:
        return {one.node: one for one in self.nodes}

    @cached_property
    def _by_name(self) -> dict[str, TensorShards]:
        return {name: one for one in self.tensors for name in one.names}

    @cached_property
    def _produced(self) -> dict[Ref, Layout]:
        return dict([*self.inputs, *(pair for one in self.nodes for pair in one.outputs)])

    @cached_property
    def _bytes(self) -> dict[Ref, int]:
        return dict(self.bytes)

    def node(self, at: int) -> NodeShards:
        """Return the layouts of a node."""
        return self._by_node[at]

    def tensor(self, name: str) -> TensorShards:
        """Return the layout of a parameter or buffer, by any of its names."""
        return self._by_name[name]

    def produced(self, ref: Ref) -> Layout:
        """Return the layout in which a value is made or arrives; `Replicate` for one that the plan does not list."""
        return self._produced.get(ref, REPLICATE)

    # ── moves and collectives ──────────────────────────────────────────────────────────────────────────────────────
    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Every conversion of the plan, in the order of the first readers."""
        return (*self._parameter_moves(), *self._value_moves())

    def _value_moves(self) -> Iterator[Move]:
        wanted: dict[Ref, dict[Layout, list[int]]] = {}
        for one in self.nodes:
            for ref, layout in one.inputs:
                wanted.setdefault(ref, {}).setdefault(layout, []).append(one.node)
        for ref, layout in self.results:
            wanted.setdefault(ref, {}).setdefault(layout, [])
        for ref, versions in wanted.items():
            grad, size = ref in self.grads, self._bytes.get(ref, 0)
            for have, want in conversions(self.produced(ref), versions, grad):
                yield Move(ref, "", have, want, tuple(versions[want]), size, grad)

    def _parameter_moves(self) -> Iterator[Move]:
        wanted: dict[str, dict[Layout, list[int]]] = {}
        for one in self.nodes:
            for name, layout in one.parameters:
                wanted.setdefault(self.tensor(name).name, {}).setdefault(layout, []).append(one.node)
        for name, versions in wanted.items():
            stored = self.tensor(name)
            for have, want in conversions(stored.layout, versions, stored.trainable):
                yield Move(None, name, have, want, tuple(versions[want]), stored.bytes, stored.trainable)

    def collectives(self) -> list[PlannedCollective]:
        """Return every collective of a step: of the moves, of stored parameters and inside local ops."""
        found = [
            PlannedCollective(name, phase, move.bytes, wire_bytes(name, move.bytes, self.size),
                              min(move.readers, default=-1), move.tensor or str(move.ref))
            for move in self.moves
            for phase, name in zip(("forward", "backward"), move.collectives, strict=True)
            if name
        ]  # fmt: skip
        for one in self.nodes:
            for inner in one.collectives:
                wire = wire_bytes(inner.name, inner.size, self.size)
                made = PlannedCollective(inner.name, inner.phase, inner.size, wire, one.node, one.local)
                found += [made] * inner.times
        for tensor in self.gradient_sums():
            wire = wire_bytes(ALL_REDUCE, tensor.bytes, self.size)
            found.append(PlannedCollective(ALL_REDUCE, "step", tensor.bytes, wire, -1, tensor.name))
        return found

    def gradient_sums(self) -> list[TensorShards]:
        """Return the parameters whose gradients the shards sum once per step, after the last backward."""
        return [one for one in self.tensors if one.trainable and isinstance(one.layout, PartialGrad)]

    @property
    def sharded_share(self) -> float:
        """The share of parameter bytes of which each shard holds only a slice."""
        whole = sum(one.bytes for one in self.tensors if one.is_read)
        cut = sum(one.bytes for one in self.tensors if isinstance(one.layout, Shard))
        return cut / whole if whole else 0.0

    # ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        writer = Writer()

        def pairs(some: Iterable[tuple[Any, Layout]]) -> list[Any]:
            return [[writer(key), write_layout(layout)] for key, layout in some]

        return {
            "gemini shard plan": VERSION,
            "size": self.size,
            "model": self.model,
            "nodes": [
                {
                    "node": one.node,
                    "inputs": pairs(one.inputs),
                    "outputs": pairs(one.outputs),
                    "parameters": pairs(one.parameters),
                    "local": one.local,
                    "sizes": [[writer(size.place), size.units] for size in one.sizes],
                    "mask": None if one.mask is None else write_layout(one.mask),
                    "collectives": [[inner.name, inner.size, inner.phase, inner.times] for inner in one.collectives],
                }
                for one in self.nodes
            ],
            "tensors": [
                [list(one.names), write_layout(one.layout), list(one.shape), one.bytes, one.trainable, one.is_read]
                for one in self.tensors
            ],
            "inputs": pairs(self.inputs),
            "results": pairs(self.results),
            "bytes": [[writer(ref), size] for ref, size in self.bytes],
            "grads": [writer(ref) for ref in sorted(self.grads, key=lambda ref: (ref.node, repr(ref)))],
            "replicated": [[one.node, one.name, one.reason, one.ms] for one in self.replicated],
            "facts": dict(self.facts),
        }

    @staticmethod
    def from_json(data: Any, source: str = "plan") -> ShardPlan:
        """Read what `to_json` returned."""
        if not isinstance(data, dict) or data.get("gemini shard plan") != VERSION:
            raise ArtifactError(f"{source} is not a shard plan of version {VERSION}\n    → run `gemini shard` again")
        try:
            return _read_plan(data)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ArtifactError(
                f"{source} cannot be read as a shard plan: {what}\n    → run `gemini shard` again"
            ) from error

    def save(self, path: str | FilePath) -> None:
        """Write the plan as JSON."""
        FilePath(path).write_text(json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | FilePath) -> ShardPlan:
        """Read a plan from a JSON file."""
        try:
            data = json.loads(FilePath(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{path} cannot be read as a shard plan: {error}") from error
        return ShardPlan.from_json(data, str(path))


def _read_plan(data: dict[str, Any]) -> ShardPlan:
    reader = Reader({})

    def pairs(some: Any) -> tuple[tuple[Any, Layout], ...]:
        return tuple((reader(key), read_layout(layout)) for key, layout in some)

    def mask(layout: Any) -> Shard | None:
        found = None if layout is None else read_layout(layout)
        if found is not None and not isinstance(found, Shard):
            raise ValueError(f"a mask is a slice, not {layout!r}")
        return found

    nodes = tuple(
        NodeShards(
            one["node"],
            pairs(one["inputs"]),
            pairs(one["outputs"]),
            pairs(one["parameters"]),
            one["local"],
            tuple(DividedSize(reader(place), units) for place, units in one["sizes"]),
            mask(one["mask"]),
            tuple(InnerCollective(*inner) for inner in one["collectives"]),
        )
        for one in data["nodes"]
    )
    tensors = tuple(
        TensorShards(tuple(names), read_layout(layout), tuple(shape), size, *facts)
        for names, layout, shape, size, *facts in data["tensors"]
    )
    return ShardPlan(
        data["size"],
        data["model"],
        nodes,
        tensors,
        pairs(data["inputs"]),
        pairs(data["results"]),
        tuple((reader(ref), size) for ref, size in data["bytes"]),
        frozenset(reader(ref) for ref in data["grads"]),
        tuple(ReplicatedOp(*one) for one in data["replicated"]),
        data["facts"],
    )
