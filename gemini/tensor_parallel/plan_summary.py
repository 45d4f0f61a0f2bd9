"""Plan summary: what a shard plan divides and exchanges, per scope, as a table and as plain data.

Scopes that differ only in the number of their layer, and in nothing else, are one row:

    scope            layers  weights     size   per shard  forward  backward
    h.*.mlp.c_fc         12  weight S1  4.7 MB     2.4 MB           all-reduce 1.6 MB
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gemini.ir.graph import Graph
from gemini.tensor_parallel.layout_classes import layer_families
from gemini.tensor_parallel.layouts import layout_text, local_size
from gemini.tensor_parallel.shard_plan import PlannedCollective, ShardPlan, TensorShards

_PHASES = ("forward", "backward", "step")
_UNITS = (("GB", 1e9), ("MB", 1e6), ("KB", 1e3))
_LISTED, _NAMED = 8, 4
_HEAD = ("scope", "layers", "weights", "size", "per shard", "forward", "backward")
_LEGEND = "S1: slices of dimension 1, S1/3: of its 3 groups · R: whole, R+: with partial gradients · P: a sum"


@dataclass(frozen=True)
class ScopeRow:
    """A scope, or equivalent scopes of several layers: bytes and collectives are those of one."""

    scope: str
    layers: int
    layouts: tuple[tuple[str, str], ...]  # of its own parameters
    bytes: int
    shard_bytes: int
    collectives: tuple[tuple[str, str, int], ...]  # phase, name, bytes


@dataclass(frozen=True)
class ShardMemory:
    """Bytes that the largest shard holds."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.activations


class PlanSummary:
    """A plan of a graph, told by its scopes."""

    def __init__(self, graph: Graph, plan: ShardPlan, optimizer_copies: float = 2.0) -> None:
        self.graph, self.plan, self.copies = graph, plan, optimizer_copies
        self._families = layer_families(graph)

    # ── facts ──────────────────────────────────────────────────────────────────────────────────────────────────────
    @cached_property
    def rows(self) -> tuple[ScopeRow, ...]:
        """The scopes with parameters or collectives, equivalent layers folded."""
        own: dict[str, list[TensorShards]] = defaultdict(list)
        for tensor in self.plan.tensors:
            own[tensor.name.rpartition(".")[0]].append(tensor)
        exchanged: dict[str, list[tuple[str, str, int]]] = defaultdict(list)
        for one in self.plan.collectives():
            exchanged[self._scope(one)].append((one.phase, one.name, one.size))
        found = [self._row(scope, own[scope], exchanged[scope]) for scope in self._order(own, exchanged)]
        folded: dict[Any, list[ScopeRow]] = defaultdict(list)
        for row in found:
            folded[self._family(row.scope), row.layouts, row.bytes, row.shard_bytes, row.collectives].append(row)
        return tuple(
            ScopeRow(key[0] if len(rows) > 1 else rows[0].scope, len(rows), *key[1:]) for key, rows in folded.items()
        )

    @cached_property
    def memory(self) -> ShardMemory:
        """What the largest shard holds; every value with a gradient counts as kept for backward."""
        plan = self.plan
        weights = sum(one.shard_bytes(plan.size) for one in plan.tensors)
        trained = sum(one.shard_bytes(plan.size) for one in plan.tensors if one.trainable)
        sizes = dict(plan.bytes)
        kept = 0
        for ref in plan.grads:
            if not self.graph.nodes[ref.node].is_source and not self.graph.nodes[ref.node].shares:
                shape = self.graph.meta(ref).shape
                whole, local = _count(shape), _count(local_size(plan.produced(ref), shape, plan.size, 0))
                kept += sizes.get(ref, 0) * local // max(whole, 1)
        return ShardMemory(weights, trained, round(trained * self.copies), kept)

    @cached_property
    def totals(self) -> dict[tuple[str, str], tuple[int, int, float]]:
        """Phase and name of the collectives of a step: number, bytes of whole values, bytes that a shard sends."""
        found: dict[tuple[str, str], list[PlannedCollective]] = defaultdict(list)
        for one in self.plan.collectives():
            found[one.phase, one.name].append(one)
        ordered = sorted(found, key=lambda key: (_PHASES.index(key[0]), key[1]))
        return {key: (len(found[key]), sum(one.size for one in found[key]), sum(one.wire for one in found[key]))
                for key in ordered}  # fmt: skip

    def of_nodes(self, nodes: Iterable[int]) -> tuple[list[str], int]:
        """Return the parameters that some nodes read, by their first names, and the number of their collectives."""
        some = set(nodes)
        names = [name for at in some for name, _ in self.plan.node(at).parameters]
        names += [node.target for node in self.graph.nodes if node.kind == "parameter" and node.id in some]
        exchanged = sum(one.node in some for one in self.plan.collectives())
        return sorted({self.plan.tensor(name).name for name in names}), exchanged

    def _scope(self, one: PlannedCollective) -> str:
        if one.node < 0:
            return one.what.rpartition(".")[0] if one.phase == "step" else ""
        node = self.graph.nodes[one.node]
        if node.kind in ("module", "block"):
            return node.target
        return node.scope[-1] if node.scope else ""

    def _family(self, scope: str) -> str:
        """Return the name of a scope with `*` for the number of its layer, where other layers are equivalent."""
        parts = scope.split(".")
        for count in range(len(parts), 0, -1):
            if (family := self._families.get(".".join(parts[:count]))) is not None:
                return ".".join([family, *parts[count:]])
        return scope

    def _order(self, own: dict[str, Any], exchanged: dict[str, Any]) -> list[str]:
        """Return the scopes with anything to tell, in the order of the model."""
        place: dict[str, int] = {}
        for name, _ in self.graph.bound_model().named_modules(remove_duplicate=False):
            place[name] = len(place)
        return sorted({*own, *exchanged}, key=lambda scope: (place.get(scope, len(place)), scope))

    def _row(self, scope: str, tensors: list[TensorShards], exchanged: list[tuple[str, str, int]]) -> ScopeRow:
        layouts = tuple((one.name.rpartition(".")[2], layout_text(one.layout)) for one in tensors)
        own, local = sum(one.bytes for one in tensors), sum(one.shard_bytes(self.plan.size) for one in tensors)
        return ScopeRow(scope, 1, layouts, own, local, tuple(sorted(exchanged)))

    # ── texts ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def table(self) -> str:
        """Return all of it as text."""
        lines = [_HEAD, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[at]) for line in lines) for at in range(len(_HEAD))]
        right = {1, 3, 4}
        texts = [
            "  ".join(f"{cell:>{width}}" if at in right else f"{cell:<{width}}"
                      for at, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
            for line in lines
        ]  # fmt: skip
        return "\n".join([self._title(), "", texts[0], "-" * max(map(len, texts)), *texts[1:], "", _LEGEND, "",
                          *self._collective_lines(), self._memory_line(), *self._replicated_lines()])  # fmt: skip

    def texts(self) -> dict[str, Any]:
        """Return the parts of the table as texts: title, head, rows, legend, lines below it."""
        below = [*self._collective_lines(), *(line.strip() for line in self._replicated_lines())]
        rows = [_cells(row) for row in self.rows]
        return {"title": self._title(), "head": _HEAD, "rows": rows, "legend": _LEGEND, "below": below}

    def _title(self) -> str:
        plan = self.plan
        whole = sum(one.bytes for one in plan.tensors)
        local = sum(one.shard_bytes(plan.size) for one in plan.tensors)
        shards = f"{plan.size} shard{'s' if plan.size > 1 else ''}"
        return (f"{plan.model} on {shards}: {plan.sharded_share:.1%} of its parameters sharded, "
                f"{_size(local)} of {_size(whole)} on each")  # fmt: skip

    def _collective_lines(self) -> list[str]:
        if not self.totals:
            return ["no collectives"]
        return [
            f"{phase}: {count} {name}, {_size(size)}, of which a shard sends {_size(wire)}"
            for (phase, name), (count, size, wire) in self.totals.items()
        ]

    def _memory_line(self) -> str:
        one = self.memory
        return (
            f"memory per shard: {_size(one.total)} (weights {_size(one.weights)}, gradients {_size(one.gradients)}, "
            f"optimizer {_size(one.optimizer)}, activations at most {_size(one.activations)})"
        )

    def _replicated_lines(self) -> list[str]:
        """Return the ops that every shard runs whole, those that cost most first, equal ones of all layers together."""
        cost: Counter[tuple[str, str]] = Counter()
        for op in self.plan.replicated:
            cost[self._family(op.name), op.reason] += op.ms  # type: ignore[assignment]
        listed = [f"  {name}: {_time(ms)} more than divided: {reason}" for (name, reason), ms in
                  cost.most_common(_LISTED)]  # fmt: skip
        more = [f"  … {len(cost) - _LISTED} more"] if len(cost) > _LISTED else []
        return ["", "every shard runs whole:", *listed, *more] if listed else []

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        memory = self.memory
        return {
            "model": self.plan.model,
            "size": self.plan.size,
            "sharded_share": self.plan.sharded_share,
            "rows": [
                {
                    "scope": row.scope, "layers": row.layers, "weights": dict(row.layouts), "bytes": row.bytes,
                    "shard_bytes": row.shard_bytes, "collectives": [list(one) for one in row.collectives],
                }
                for row in self.rows
            ],
            "collectives": [
                {"phase": phase, "name": name, "count": count, "bytes": size, "sent": wire}
                for (phase, name), (count, size, wire) in self.totals.items()
            ],
            "memory": {**vars(memory), "total": memory.total},
            "replicated": [{"node": one.node, "name": one.name, "reason": one.reason, "ms": one.ms}
                           for one in self.plan.replicated],
        }  # fmt: skip


def weight_texts(layouts: Iterable[tuple[str, str]]) -> list[str]:
    """Return the layouts of some parameters; those of many with one layout together: `8 weights S0/4`."""
    own = list(layouts)
    if len(own) <= _NAMED:
        return [f"{name} {layout}" for name, layout in own]
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, layout in own:
        groups[("biases" if "bias" in name else "weights"), layout].append(name)
    return [f"{names[0] if len(names) == 1 else f'{len(names)} {what}'} {layout}"
            for (what, layout), names in groups.items()]  # fmt: skip


def _cells(row: ScopeRow) -> tuple[str, ...]:
    weights = ", ".join(weight_texts(row.layouts))
    phases = [", ".join(_counted(row, phase)) for phase in ("forward", "backward")]
    phases[1] = ", ".join(filter(None, (phases[1], *(f"{text} per step" for text in _counted(row, "step")))))
    sizes = (_size(row.bytes), _size(row.shard_bytes)) if row.layouts else ("", "")
    return row.scope or "(model)", str(row.layers) if row.layers > 1 else "", weights, *sizes, *phases


def _counted(row: ScopeRow, phase: str) -> list[str]:
    found = Counter((name, size) for own, name, size in row.collectives if own == phase)
    return [f"{f'{count} ' if count > 1 else ''}{name} {_size(size)}" for (name, size), count in found.items()]


def _size(size: float) -> str:
    name, unit = next(((name, unit) for name, unit in _UNITS if size >= unit), ("B", 1.0))
    return f"{size / unit:.4g} {name}"


def _time(ms: float) -> str:
    return f"{ms:.3g} ms" if ms >= 1e-3 else "less than 1 µs"


def _count(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found
