"""Twin rest: what steps fetch behind the forward and backward parts of a twin, copied as it is fetched.

Clipping, optimizers, averages and summaries take the new gradients in place of the old ones, and whole tensors in place
of those of the forward part. What updates variables in shards is copied per shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gemini.tensorflow.forward_facts import ForwardFacts
from gemini.tensorflow.forward_pieces import ForwardPieces
from gemini.tensorflow.gradient_notes import GradientNote
from gemini.tensorflow.mirror_graph import MirrorGraph
from gemini.tensorflow.node_writer import NodeWriter
from gemini.tensorflow.piece_layouts import REPLICATE, Shard
from gemini.tensorflow.rules.registry import RANDOM
from gemini.tensorflow.sharded_pieces import ShardedPieces
from gemini.tensorflow.sharded_variables import VariableShards, rest_way, shard_name, static_op, value_argument
from gemini.tensorflow.split_plan import SplitPlan, SplitRefused
from gemini.tensorflow.stage_cut import StagePlacement


@dataclass(frozen=True)
class RestShards:
    """The tensors per shard that make up one behind the gradients."""

    layout: Shard
    parts: list[str]
    devices: tuple[str, ...]


class TwinRest:
    """The rest of a twin, and what it knows of the other parts."""

    def __init__(  # noqa: PLR0917
        self, mirror: MirrorGraph, notes: Sequence[GradientNote], facts: ForwardFacts, plan: SplitPlan,
        placement: StagePlacement, sources: frozenset[str], number: int,
    ) -> None:  # fmt: skip
        self.prefix = f"gemini/twin{number}/"
        self.plan, self.facts = plan, facts
        self._mirror, self._placement = mirror, placement
        self.notes = tuple(notes)
        self._writer = NodeWriter(mirror.graph, self.prefix)
        self.pieces: ForwardPieces | ShardedPieces = ForwardPieces(facts, plan, self._writer, placement)
        self._sources = sources  # tensors that steps feed
        self._rest_devices: dict[str, str] = {}
        self._resolved: dict[str, str] = {}  # tensor of the script → tensor of the twin
        self._copied: dict[str, str] = {}  # op of the script → op of the twin
        self._depends: dict[str, bool] = {}
        self._reads: dict[str, Any] = {}  # variable → the read of it that updates share
        self._variables: VariableShards | None = mirror.variables
        self._shards: dict[str, RestShards] = {}  # tensor of the script → those of the twin
        self._ungrouped: dict[str, list[str]] = {}  # op of the script → its copies on shards

    @property
    def graph(self) -> Any:
        """The graph that the twin is in."""
        return self._mirror.graph

    # ── names ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def resolve(self, tensors: Sequence[Any], ops: Sequence[Any]) -> tuple[list[str], list[str]]:
        """Return the names in the twin of tensors and ops of the script; copies what they need."""
        for op in self._missing([*(tensor.op for tensor in tensors if not self._is_resolved(tensor.name)), *ops]):
            self._copy(op)
        names = [self._tensor_name(tensor.name, tensor.op) for tensor in tensors]
        targets = [self._op_name(op) for op in ops]
        self._writer.flush()
        return names, targets

    def _is_forward(self, op: Any) -> bool:
        return any(self.pieces.is_known(output.name) for output in op.outputs)

    def _is_dependent(self, op: Any) -> bool:
        """Whether an op depends on the forward part's data or on gradients."""
        stack = [op]
        while stack:
            one = stack[-1]
            if one.name in self._depends:
                stack.pop()
                continue
            if any(output.name in self.facts.tainted for output in one.outputs) and self._is_forward(one):
                self._depends[one.name] = True
                continue
            if any(map(self._is_resolved, (output.name for output in one.outputs))) or self._reads_shards(one):
                self._depends[one.name] = True
                continue
            inputs = [tensor.op for tensor in one.inputs if not self._is_source(tensor.name)]
            inputs += one.control_inputs
            waiting = [other for other in inputs if other.name not in self._depends]
            if waiting:
                stack += waiting
                continue
            self._depends[one.name] = any(self._depends[other.name] for other in inputs)
        return self._depends[op.name]

    def _is_source(self, name: str) -> bool:
        return name in self._sources

    def _missing(self, ops: Sequence[Any]) -> list[Any]:
        """Return the dependent ops that are not copied, inputs first."""
        order: list[Any] = []
        seen: set[str] = set()
        stack = [(op, False) for op in ops]
        while stack:
            op, is_done = stack.pop()
            if is_done:
                order.append(op)
                continue
            if op.name in seen or op.name in self._copied or self._is_forward(op) or not self._is_dependent(op):
                continue
            seen.add(op.name)
            stack.append((op, True))
            stack += [(tensor.op, False) for tensor in op.inputs if not self._is_resolved(tensor.name)]
            stack += [(control, False) for control in op.control_inputs]
        return order

    def _copy(self, op: Any) -> None:
        if op.type in RANDOM:
            raise SplitRefused(f"the random numbers of {op.name} depend on the batch")
        controls = [f"^{name}" for control in op.control_inputs for name in self._control_names(control)]
        name = f"{self.prefix}rest/{op.name}"
        if self._copy_update(op, name, controls) or self._copy_on_shards(op, name, controls):
            self._copied[op.name] = name
            return
        inputs = [self._tensor_name(tensor.name, tensor.op) for tensor in op.inputs]
        device = self._rest_devices[name] = self._rest_device(op, inputs)
        controls = self._gather_controls(controls, device)
        self._writer.copy(self._mirror.node_of[op.name], name, [*inputs, *controls], device)
        self._copied[op.name] = name

    def find_boundary(self, names: Iterable[str], ops: Iterable[str]) -> list[str]:
        """Return the gradients and tensors of the forward part that a step takes, by name."""
        graph = self._mirror.graph
        gradients = {*self.resolve([tensor for note in self.notes for tensor in note.tensors], ())[0]}
        found: dict[str, None] = {}
        seen: set[str] = set()
        stack = [graph.get_operation_by_name(name) for name in ops]
        waiting = [graph.get_tensor_by_name(name) for name in names]
        while stack or waiting:
            for tensor in waiting:
                name = tensor.op.name
                is_twin = name.startswith(self.prefix) and not name.startswith(f"{self.prefix}rest/")
                if (
                    is_twin
                    or tensor.name in gradients
                    or (tensor.name in self.facts.tainted and not self._is_source(tensor.name))
                ):
                    found[tensor.name] = None
                else:
                    stack.append(tensor.op)
            waiting = []
            if stack and (op := stack.pop()).name not in seen:
                seen.add(op.name)
                waiting, stack = list(op.inputs), [*stack, *op.control_inputs]
        return list(found)

    def _gather_controls(self, controls: Sequence[str], device: str) -> list[str]:
        """Return controls with one op in the place of all on another device, which would send a message each."""
        by_device: dict[str, list[str]] = {}
        for control in controls:
            by_device.setdefault(self._device_of(control.lstrip("^")), []).append(control)
        found = []
        for where, names in by_device.items():
            if where not in ("", device) and len(names) > 1:
                gate = self._writer.fresh("Done")
                self._writer.add("NoOp", gate, names, where)
                names = [f"^{gate}"]
            found += names
        return found

    def _first_read(self, op: Any) -> Any:
        """Return the op in the place of a read of a variable, without an order, that the graph has several times."""
        if op.type != "ReadVariableOp" or op.control_inputs:
            return op
        return self._reads.setdefault(op.inputs[0].name, op)

    # ── the rest on shards ─────────────────────────────────────────────────────────────────────────────────────────
    def _is_resolved(self, name: str) -> bool:
        return name in self._resolved or name in self._shards

    def _reads_shards(self, op: Any) -> bool:
        variables = self._variables
        return variables is not None and op.type == "ReadVariableOp" and op.inputs[0].op.name in variables

    def _control_names(self, op: Any) -> list[str]:
        """Return the names of what an op follows; a read in shards must not be joined for the order alone."""
        if self._reads_shards(op) and op.name not in self._copied and self._variables is not None:
            return [shard_name(op.name, shard) for shard in range(self._variables.count)]
        return [self._op_name(op)]

    def _shards_of(self, name: str) -> RestShards | None:
        """Return a tensor in shards: one behind the gradients, or a variable as the forward part reads it."""
        if name not in self._shards and self._variables is not None and name in self._variables.reads:
            base = name.partition(":")[0]
            variable = self._mirror.node_of[base].input[0]
            parts = [shard_name(base, shard) + ":0" for shard in range(self._variables.count)]
            self._shards[name] = RestShards(self._variables.reads[name], parts, self._variables.devices_of[variable])
        return self._shards.get(name)

    def _parts(self, tensor: Any, wanted: Shard, devices: Sequence[str]) -> list[str]:
        """Return the parts of a tensor; one that is whole, or otherwise divided, is cut."""
        found = self._shards_of(tensor.name)
        if found is not None and found.layout == wanted:
            return found.parts
        whole, kind = self._tensor_name(tensor.name, tensor.op), tensor.dtype.as_datatype_enum
        return self._writer.split(whole, [wanted.factor] * len(devices), wanted.dim, kind, devices[0])

    def _copy_update(self, op: Any, name: str, controls: Sequence[str]) -> bool:
        """Copy what reads or updates variables in shards; False for other ops."""
        variables = self._variables
        stored = [] if variables is None else variables.handles(op)
        if variables is None or not stored or op.type == "VarIsInitializedOp":
            return False
        layout, devices, at = variables.layout_of[stored[0]], variables.devices_of[stored[0]], value_argument(op.type)
        parts = self._parts(op.inputs[at], layout, devices) if at >= 0 else []
        inputs = [
            tensor.op.name if tensor.op.name in stored
            else "" if place == at
            else self._tensor_name(tensor.name, tensor.op)
            for place, tensor in enumerate(op.inputs)
        ]  # fmt: skip
        node = self._mirror.node_of[op.name]
        copies = variables.write_copies(self._writer, node, name, [*inputs, *controls], parts)
        if op.outputs:
            self._shards[op.outputs[0].name] = RestShards(layout, copies, devices)
        self._ungrouped[op.name] = copies
        return True

    def _copy_on_shards(self, op: Any, name: str, controls: Sequence[str]) -> bool:
        """Copy an op whose inputs are in shards per shard; False where it takes whole tensors."""
        near = next(filter(None, (self._shards_of(tensor.name) for tensor in op.inputs)), None)
        if near is None:
            return False
        count = len(near.devices)
        given = [found.layout if (found := self._shards_of(one.name)) else REPLICATE for one in op.inputs]
        way = rest_way(static_op(op), given, count)
        if way is None:
            return False
        inputs = [
            self._parts(tensor, layout, near.devices) if isinstance(layout, Shard)
            else [self._tensor_name(tensor.name, tensor.op)] * count
            for tensor, layout in zip(op.inputs, way.inputs, strict=True)
        ]  # fmt: skip
        copies = [shard_name(name, shard) for shard in range(count)]
        for shard, copy in enumerate(copies):
            own = [*(parts[shard] for parts in inputs), *controls]
            self._writer.copy(self._mirror.node_of[op.name], copy, own, near.devices[shard])
        for at, (output, layout) in enumerate(zip(op.outputs, way.outputs, strict=True)):
            parts = [f"{copy}:{at}" for copy in copies]
            if isinstance(layout, Shard):
                self._shards[output.name] = RestShards(layout, parts, near.devices)
            else:
                kind = output.dtype.as_datatype_enum
                self._resolved[output.name] = self._writer.add_up(parts, kind, near.devices[0])
        self._ungrouped[op.name] = copies
        return True

    def _join(self, name: str) -> str:
        """Return a tensor in shards as a whole."""
        found, kind = self._shards[name], self._mirror.source.get_tensor_by_name(name).dtype.as_datatype_enum
        self._resolved[name] = self._writer.concatenate(found.parts, found.layout.dim, kind, found.devices[0])
        return self._resolved[name]

    def _rest_device(self, op: Any, inputs: Sequence[str]) -> str:
        """Return the device of the gradients that an op takes, if it is one; variables place their own ops."""
        devices = {self._device_of(name) for name, tensor in zip(inputs, op.inputs, strict=True)
                   if tensor.op.type not in ("Const", "VarHandleOp")} - {""}  # fmt: skip
        return devices.pop() if len(devices) == 1 else ""

    def _device_of(self, name: str) -> str:
        base = name.partition(":")[0]
        if base in self._rest_devices:
            return self._rest_devices[base]
        try:
            return str(self._mirror.graph.get_operation_by_name(base).device)
        except KeyError:
            return ""

    def _tensor_name(self, name: str, op: Any) -> str:
        if name in self._resolved:
            return self._resolved[name]
        if self._is_source(name):
            return name
        if name in self._shards:
            return self._join(name)
        if self._variables is not None and op.name in self._variables:
            return shard_name(op.name, 0)
        if self._is_forward(op):
            return self.pieces.whole(name)
        if op.name in self._copied:
            return f"{self._copied[op.name]}:{name.partition(':')[2]}"
        return str(self._first_read(op).outputs[int(name.partition(":")[2])].name)

    def _op_name(self, op: Any) -> str:
        if op.name in self._copied:
            if copies := self._ungrouped.pop(op.name, None):
                self._writer.group(copies, self._copied[op.name], "")
            return self._copied[op.name]
        if self._is_forward(op) and op.outputs:
            return self._tensor_name(op.outputs[0].name, op).partition(":")[0]
        return str(op.name)
