"""Sharded variables: which variables are stored in shards, and the nodes of the mirror that stand for them.

    script's graph                    mirror
    kernel   VarHandleOp [32, 64]     kernel/shard_0 and kernel/shard_1, [32, 32], on the devices of the shards
    read     ReadVariableOp           read/shard_0, read/shard_1; `read` is their concatenation
    update   Assign…, ResourceApply…  update/shard_0, update/shard_1 of the pieces of the value; `update` is both

Every other name stays, so fetches, savers and checkpoints have whole variables under the names of the script. A
weight is stored as the products divide it; slots and averages follow, as the same updates write them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemini.errors import GraphError
from gemini.tensorflow.forward_facts import ForwardFacts
from gemini.tensorflow.gradient_notes import GradientNote, components
from gemini.tensorflow.node_writer import NodeWriter
from gemini.tensorflow.piece_layouts import REPLICATE, Layout, Replicate, Shard
from gemini.tensorflow.rules.registry import RULES
from gemini.tensorflow.shard_ways import ShardRequest, plan_shards
from gemini.tensorflow.split_plan import SplitRefused, fits
from gemini.tensorflow.split_way import ForwardOp, Way

_ASSIGNS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_VALUES = ("value", "grad", "delta")  # the arguments of updates that have the shape of the variable
_RESOURCE = 20  # DT_RESOURCE


@dataclass
class VariableShards:
    """The layout and the devices of every variable in shards, by the name of its op."""

    count: int
    layout_of: dict[str, Shard] = field(default_factory=dict)
    devices_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    reads: dict[str, Shard] = field(default_factory=dict)  # tensors of the script that read one

    def __contains__(self, handle: str) -> bool:
        return handle in self.layout_of

    def store(self, handle: str, layout: Shard, devices: tuple[str, ...]) -> None:
        """Store a variable in shards."""
        self.layout_of[handle], self.devices_of[handle] = layout, devices

    def handles(self, op: Any) -> list[str]:
        """Return the variables in shards that an op takes."""
        return [tensor.op.name for tensor in op.inputs if tensor.op.name in self.layout_of]

    # ── nodes ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def write(self, writer: NodeWriter, node: Any) -> bool:
        """Write what stands for a node of the script; False for a node that is no part of a variable in shards."""
        names = [name for name in node.input if name in self.layout_of]
        if node.op == "VarHandleOp" and node.name in self.layout_of:
            self._write_handles(writer, node)
        elif not names:
            return False
        elif node.op == "VarIsInitializedOp":
            writer.copy(node, node.name, [shard_name(names[0], 0)], self.devices_of[names[0]][0])
        elif node.op == "ReadVariableOp":
            parts = self.write_copies(writer, node, node.name, node.input, [])
            layout, kind = self.layout_of[names[0]], node.attr["dtype"].type
            writer.concatenate(parts, layout.dim, kind, self.devices_of[names[0]][0], node.name)
            self.reads[f"{node.name}:0"] = layout
        elif value_argument(node.op) < 0:
            raise GraphError(
                f"{node.name} ({node.op}) takes {names[0]}, which exists in shards since the first run of the session\n"
                "    → build the whole graph before, or make a new session"
            )
        else:
            value = node.input[value_argument(node.op)]
            kind = node.attr["T" if "T" in node.attr else "dtype"].type
            parts = self.cut(writer, value, names[0], kind)
            copies = self.write_copies(writer, node, node.name, node.input, parts)
            writer.group(copies, node.name, self.devices_of[names[0]][0])
        return True

    def cut(self, writer: NodeWriter, value: str, variable: str, kind: int) -> list[str]:
        """Write the pieces of a whole value of a variable."""
        layout = self.layout_of[variable]
        sizes = [layout.factor] * self.count
        return writer.split(value, sizes, layout.dim, kind, self.devices_of[variable][0])

    def write_copies(
        self, writer: NodeWriter, node: Any, name: str, inputs: Sequence[str], parts: Sequence[str]
    ) -> list[str]:
        """Write an op on every shard of its variables, with the pieces of its value; return the copies."""
        at = value_argument(node.op) if parts else -1
        variable = next(one for one in inputs if one in self.layout_of)
        for shard, device in enumerate(self.devices_of[variable]):
            own = [shard_name(one, shard) if one in self.layout_of else one for one in inputs]
            if parts:
                own[at] = parts[shard]
            writer.copy(node, shard_name(name, shard), own, device)
        return [shard_name(name, shard) + ":0" for shard in range(self.count)]

    def _write_handles(self, writer: NodeWriter, node: Any) -> None:
        layout = self.layout_of[node.name]
        for shard, device in enumerate(self.devices_of[node.name]):
            made = writer.copy(node, shard_name(node.name, shard), [], device)
            made.attr["shape"].shape.dim[layout.dim].size = layout.factor
            made.attr["shared_name"].s = made.name.encode()


def shard_name(name: str, shard: int) -> str:
    """Return the name of what stands for an op on a shard."""
    return f"{name}/shard_{shard}"


def value_argument(kind: str) -> int:
    """Return the place of the argument that has the shape of the variable; -1 where a type of op has none."""
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(kind)
    names = [] if definition is None else [argument.name for argument in definition.input_arg]
    return next((at for at, name in enumerate(names) if name in _VALUES), -1)


# ── which ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def plan_variables(
    graph: Any, facts: ForwardFacts, notes: Sequence[GradientNote], request: ShardRequest,
    devices_of: Callable[[str], tuple[str, ...]],
) -> VariableShards:  # fmt: skip
    """Return the variables of a graph to store in shards."""
    blocked: set[str] = set()
    while True:
        shards = VariableShards(request.shards)
        _store_weights(shards, graph, facts, request, blocked, devices_of)
        conflict = follow_updates(shards, graph, notes, blocked)
        if not conflict:
            return shards
        blocked |= conflict


def _store_weights(  # noqa: PLR0917
    shards: VariableShards, graph: Any, facts: ForwardFacts, request: ShardRequest, blocked: set[str],
    devices_of: Callable[[str], tuple[str, ...]],
) -> None:  # fmt: skip
    """Store the weights whose readers all take the same shards of them."""
    handle_of = {op.outputs[0]: op.inputs[0].partition(":")[0] for op in facts if op.type == "ReadVariableOp"}
    stored: dict[str, Shard] = {}
    refused = set(blocked)
    while True:
        try:
            wanted = _wanted(facts, request, stored, handle_of)
        except SplitRefused:
            return
        found = {
            handle: next(iter(layouts))
            for handle, layouts in wanted.items()
            if len(layouts) == 1 and handle not in refused and _is_storable(graph, handle)
        }
        refused |= {handle_of[name] for name in stored} - found.keys()
        now = {read: found[handle] for read, handle in handle_of.items() if handle in found and handle not in refused}
        if now == stored:
            break
        stored = now
    for name, layout in stored.items():
        shards.store(handle_of[name], layout, devices_of(handle_of[name]))


def _wanted(
    facts: ForwardFacts, request: ShardRequest, stored: Mapping[str, Shard], handle_of: Mapping[str, str]
) -> dict[str, set[Shard]]:
    """Return the shards that readers take of variables; without variables that a reader takes whole."""
    plan = plan_shards(facts, request, stored)
    wanted: dict[str, set[Shard]] = {}
    whole: set[str] = set()
    for op in facts:
        for name, layout in zip(op.inputs, plan.way_of[op.name].inputs, strict=True):
            if name not in handle_of:
                continue
            if isinstance(layout, Shard) and layout.outer == 1:
                wanted.setdefault(handle_of[name], set()).add(layout)
            elif op.type != "L2Loss" or name in stored:  # the sum of the squares of shards is a sum too
                whole.add(handle_of[name])
    return {handle: layouts for handle, layouts in wanted.items() if handle not in whole}


def _is_storable(graph: Any, handle: str) -> bool:
    """Whether all that takes the handle of a variable reads or updates the whole of it."""
    maker = graph.get_operation_by_name(handle)
    readers = maker.outputs[0].consumers()
    return maker.type == "VarHandleOp" and all(
        op.type in ("ReadVariableOp", "VarIsInitializedOp", *_ASSIGNS)
        or (op.type.startswith("ResourceApply") and value_argument(op.type) >= 0)
        for op in readers
    )


def follow_updates(shards: VariableShards, graph: Any, notes: Sequence[GradientNote], blocked: set[str]) -> set[str]:
    """Store what the updates of stored variables write; return variables that cannot be stored for this."""
    rows = {
        source.op.name
        for note in notes
        for source, gradient in zip(note.sources, note.gradients, strict=True)
        if source.op.name in shards and len(components(gradient)) == 2
    }
    if rows:
        return rows
    operations = graph.get_operations()
    size = -1
    while size != len(shards.layout_of):
        size = len(shards.layout_of)
        layouts = {
            gradient.name: (shards.layout_of[source.op.name], source.op.name)
            for note in notes
            for source, gradient in zip(note.sources, note.gradients, strict=True)
            if source.op.name in shards and gradient is not None
        }
        for op in operations:
            conflict = _follow(shards, op, layouts, blocked)
            if conflict:
                return conflict
    return set()


def _follow(shards: VariableShards, op: Any, layouts: dict[str, tuple[Shard, str]], blocked: set[str]) -> set[str]:
    """Pass the shards of the inputs of an op on, to its results or to the variable that it writes."""
    handles = [tensor.op for tensor in op.inputs if tensor.dtype.as_datatype_enum == _RESOURCE]
    stored = [one.name for one in handles if one.name in shards]
    if op.type == "ReadVariableOp" and stored:
        layouts[op.outputs[0].name] = (shards.layout_of[stored[0]], stored[0])
    elif op.type.startswith("ResourceApply") and stored:
        return _store_slots(shards, op, handles, stored[0], blocked)
    elif op.type in _ASSIGNS and not stored and op.inputs[1].name in layouts:
        layout, variable = layouts[op.inputs[1].name]
        if shards.layout_of[variable] == layout and _can_follow(handles[0], op.inputs[1].shape, blocked):
            shards.store(handles[0].name, layout, shards.devices_of[variable])
    elif not handles and (near := [layouts[one.name][1] for one in op.inputs if one.name in layouts]):
        given = [layouts[one.name][0] if one.name in layouts else REPLICATE for one in op.inputs]
        way = rest_way(static_op(op), given, shards.count)
        results = zip(op.outputs, way.outputs if way is not None else (), strict=False)
        layouts.update((one.name, (layout, near[0])) for one, layout in results if isinstance(layout, Shard))
    return set()


def _store_slots(shards: VariableShards, op: Any, handles: Sequence[Any], variable: str, blocked: set[str]) -> set[str]:
    """Store all variables of one update alike; return them where that is impossible."""
    layout = shards.layout_of[variable]
    if value_argument(op.type) < 0:
        return {handle.name for handle in handles}
    shape = op.inputs[value_argument(op.type)].shape
    for one in handles:
        if shards.layout_of.get(one.name, layout) != layout:
            return {handle.name for handle in handles}
        if one.name not in shards:
            if not _can_follow(one, shape, blocked):
                return {handle.name for handle in handles}
            shards.store(one.name, layout, shards.devices_of[variable])
    return set()


def _can_follow(handle: Any, shape: Any, blocked: set[str]) -> bool:
    if handle.type != "VarHandleOp" or handle.name in blocked or not shape.is_fully_defined():
        return False
    own = [one.size for one in handle.get_attr("shape").dim]
    return own == shape.as_list() and _is_storable(handle.graph, handle.name)


# ── the rest of the graph ──────────────────────────────────────────────────────────────────────────────────────────
def static_op(op: Any) -> ForwardOp:
    """Return the facts of an op whose shapes are those of variables."""
    from tensorflow.python.framework.tensor_util import constant_value

    def shape(tensor: Any) -> tuple[int, ...] | None:
        return tuple(tensor.shape.as_list()) if tensor.shape.is_fully_defined() else None

    return ForwardOp(
        op.name, op.type, tuple(one.name for one in op.inputs), tuple(one.name for one in op.outputs),
        tuple(map(shape, op.inputs)), tuple(map(shape, op.outputs)), tuple(map(constant_value, op.inputs)),
        op.node_def.attr, is_stateful=bool(op.op_def.is_stateful),
    )  # fmt: skip


def rest_way(op: ForwardOp, layouts: Sequence[Layout], shards: int) -> Way | None:
    """Return how an op behind the gradients runs on shards, by the rules of forward ops; None: on whole tensors."""
    rule = RULES.get(op.type)
    if rule is None or op.is_stateful or all(isinstance(layout, Replicate) for layout in layouts):
        return None
    way = rule(op, layouts)
    if way is None or way.is_whole or way.type or way.scale != 1.0 or way.shape_input is not None:
        return None
    if any(isinstance(one, Shard) and one.outer > 1 for one in way.outputs):
        return None
    shapes = zip((*way.inputs, *way.outputs), (*op.in_shapes, *op.out_shapes), strict=True)
    return way if way.row_input is None and all(fits(layout, shape, shards) for layout, shape in shapes) else None
