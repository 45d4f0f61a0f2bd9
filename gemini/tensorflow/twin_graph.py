"""Twin graph: one kind of step, on micro-batches and stages, next to the mirror of the script's graph.

forward part     written once more per micro-batch and stage (`forward_pieces`)
backward part    TensorFlow's own gradients of that
the rest         clipping, optimizers, averages, summaries: copied when a step fetches them, with the new gradients
                 in place of the old ones and whole tensors in place of those of the forward part
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gemini.tensorflow.forward_facts import ForwardFacts
from gemini.tensorflow.forward_pieces import ForwardPieces
from gemini.tensorflow.gradient_notes import GradientNote, components
from gemini.tensorflow.mirror_graph import MirrorGraph
from gemini.tensorflow.node_writer import NodeWriter
from gemini.tensorflow.piece_layouts import REPLICATE, Shard
from gemini.tensorflow.rules.registry import RANDOM
from gemini.tensorflow.sharded_pieces import ShardedPieces
from gemini.tensorflow.sharded_variables import VariableShards, rest_way, shard_name, static_op, value_argument
from gemini.tensorflow.split_plan import BatchSource, SplitPlan, SplitRefused
from gemini.tensorflow.stage_placement import StagePlacement

Block = tuple[str, int, int]
"""`F` or `B`, micro-batch, stage."""


@dataclass(frozen=True)
class RestShards:
    """The tensors per shard that make up one behind the gradients."""

    layout: Shard
    parts: list[str]
    devices: tuple[str, ...]


class TwinGraph:
    """The twin of the steps that reach some notes, for one batch shape."""

    def __init__(  # noqa: PLR0917
        self, mirror: MirrorGraph, notes: Sequence[GradientNote], facts: ForwardFacts, plan: SplitPlan,
        placement: StagePlacement, sources: frozenset[str], number: int,
    ) -> None:  # fmt: skip
        self.prefix = f"gemini/twin{number}/"
        self.plan, self.facts = plan, facts
        self._mirror, self._placement = mirror, placement
        self.notes = tuple(notes)
        self._writer = NodeWriter(mirror.graph, self.prefix)
        self.pieces: ForwardPieces | ShardedPieces = ForwardPieces(facts, plan, self._writer, mirror.node_of, placement)
        self._sources = sources  # tensors that steps feed
        self._rest_devices: dict[str, str] = {}
        self._resolved: dict[str, str] = {}  # tensor of the script → tensor of the twin
        self._copied: dict[str, str] = {}  # op of the script → op of the twin
        self._depends: dict[str, bool] = {}
        self._variables: VariableShards | None = mirror.variables
        self._shards: dict[str, RestShards] = {}  # tensor of the script → those of the twin
        self._ungrouped: dict[str, list[str]] = {}  # op of the script → its copies on shards
        self.block_of: dict[str, Block] = {}  # op of the twin → block
        self._block_name = re.compile(re.escape(self.prefix) + r"([FDW])(\d*)/S(\d+)/")

    def shard(
        self, plan: SplitPlan, sources: Mapping[str, BatchSource], micro_batches: int, stored: Iterable[str] = ()
    ) -> None:
        """Divide the forward part over the shards of its stages as well; reads `stored` exist in shards."""
        self.pieces = ShardedPieces(
            self.facts, plan, self._writer, self._mirror, self._placement, sources, micro_batches, stored
        )

    @property
    def graph(self) -> Any:
        """The graph that the twin is in."""
        return self._mirror.graph

    def build(self) -> None:
        """Write the forward part and differentiate it."""
        self.pieces.write([loss.name for note in self.notes for loss in note.losses])
        self.plan = self.pieces.plan
        losses = {loss.name: self.pieces.whole(loss.name) for note in self.notes for loss in note.losses}
        self._resolved.update(losses)
        self._writer.flush()
        for op in self._mirror.graph.get_operations():
            found = self._block_name.match(op.name)
            if found and found[1] == "F":
                self.block_of[op.name] = ("F", int(found[2]), int(found[3]))
        for note in self.notes:
            self._differentiate(note)

    def _differentiate(self, note: GradientNote) -> None:
        from tensorflow.python.ops import gradients_impl

        graph = self._mirror.graph
        before = len(graph.get_operations())
        tensors = [graph.get_tensor_by_name(self._resolved[loss.name]) for loss in note.losses]
        groups = [[graph.get_tensor_by_name(name) for name in self._source_names(source)] for source in note.sources]
        flat = [one for group in groups for one in group]
        taken = [graph.get_tensor_by_name(name) for name in sorted(self._sources & self.facts.tainted)]
        with graph.as_default():
            found = gradients_impl.gradients(
                tensors, flat, name=self.prefix + "gradients", colocate_gradients_with_ops=True,
                stop_gradients=taken, **self._arguments(note.arguments),
            )  # fmt: skip
        self._place_gradients(graph.get_operations()[before:])
        rest = iter(found)
        self._map_gradients(note, [list(islice(rest, len(group))) for group in groups])

    def _arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        arguments = {key: value for key, value in given.items() if key not in ("grad_ys", "stop_gradients")}
        if given.get("stop_gradients"):
            raise SplitRefused("tf.gradients with stop_gradients")
        seeds = given.get("grad_ys")
        if seeds is not None:
            seeds = list(seeds) if isinstance(seeds, (list, tuple)) else [seeds]
            if any(seed is not None and (not hasattr(seed, "op") or self._is_dependent(seed.op)) for seed in seeds):
                raise SplitRefused("tf.gradients with grad_ys that depend on the batch")
            graph = self._mirror.graph
            arguments["grad_ys"] = [None if seed is None else graph.get_tensor_by_name(seed.name) for seed in seeds]
        return arguments

    def _source_names(self, source: Any) -> list[str]:
        if self.pieces.is_known(source.name) and source.name in self.facts.tainted:
            raise SplitRefused(f"gradients of {source.name}, which depends on the batch")
        if self._variables is not None and source.op.name in self._variables:
            return [shard_name(source.op.name, shard) + ":0" for shard in range(self._variables.count)]
        return [str(source.name)]

    def _place_gradients(self, ops: Sequence[Any]) -> None:
        """Give every backward op the block and the device of its forward op.

        Devices take the place of colocation, which contradicts itself where an op is near two of other devices.
        """
        for op in ops:
            near = [group.decode().removeprefix("loc:@") for group in op.colocation_groups()]
            near = [name for name in near if name != op.name]
            base = next((name for name in near if name in op.name), near[0] if near else "")
            found = self._block_name.search(op.name) or self._block_name.match(base)
            if found is not None and found[1] == "F":
                self.block_of[op.name] = ("B", int(found[2]), int(found[3]))
            device = self._device_of(base) or (self._placement.devices[int(found[3])] if found else "")
            if device:
                op._set_device(device)
                op._clear_attr("_class")

    def _map_gradients(self, note: GradientNote, found: Sequence[list[Any]]) -> None:
        import tensorflow.compat.v1 as tf

        for source, old, parts in zip(note.sources, note.gradients, found, strict=True):
            if old is None:
                continue
            if any(part is None for part in parts):
                raise SplitRefused(f"no gradient of {source.name} in the twin")
            if self._variables is not None and source.op.name in self._variables:
                with self._mirror.graph.as_default():
                    names = [tf.convert_to_tensor(part).name for part in parts]
                layout, devices = self._variables.layout_of[source.op.name], self._variables.devices_of[source.op.name]
                self._shards[old.name] = RestShards(layout, names, devices)
                continue
            (new,) = parts
            if len(components(old)) == 1 and len(components(new)) == 2:
                with self._mirror.graph.as_default():
                    new = tf.convert_to_tensor(new)
            if len(components(old)) != len(components(new)):
                raise SplitRefused(f"the gradient of {source.name} has rows in the graph, and none in the twin")
            for one, other in zip(components(old), components(new), strict=True):
                self._resolved[one.name] = other.name

    def whole(self, name: str) -> Any:
        """Return the tensor of the twin that equals one of the forward part."""
        found = self.pieces.whole(name)
        self._writer.flush()
        return self._mirror.graph.get_tensor_by_name(found)

    def count_ops(self) -> dict[str, int]:
        """Return the number of ops of the forward and backward parts per device, by stage and shard."""
        names = [device for shards in self._placement.shards for device in shards] or list(self._placement.devices)
        counts = dict.fromkeys(names, 0)
        rest = f"{self.prefix}rest/"
        for op in self._mirror.graph.get_operations():
            if op.device in counts and op.name.startswith(self.prefix) and not op.name.startswith(rest):
                counts[op.device] += 1
        return counts

    # ── the rest ───────────────────────────────────────────────────────────────────────────────────────────────────
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
        self._writer.copy(self._mirror.node_of[op.name], name, [*inputs, *controls], device)
        self._copied[op.name] = name

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
        return name

    def _op_name(self, op: Any) -> str:
        if op.name in self._copied:
            if copies := self._ungrouped.pop(op.name, None):
                self._writer.group(copies, self._copied[op.name], "")
            return self._copied[op.name]
        if self._is_forward(op) and op.outputs:
            return self._tensor_name(op.outputs[0].name, op).partition(":")[0]
        return str(op.name)
