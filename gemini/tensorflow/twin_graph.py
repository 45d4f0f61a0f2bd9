"""Twin graph: one kind of step, on micro-batches and stages, next to the mirror of the script's graph.

forward part     written once more per micro-batch and stage (`forward_pieces`)
backward part    TensorFlow's own gradients of that
the rest         clipping, optimizers, averages, summaries (`twin_rest`)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from gemini.tensorflow.gradient_notes import GradientNote, components
from gemini.tensorflow.sharded_pieces import ShardedPieces
from gemini.tensorflow.sharded_variables import shard_name
from gemini.tensorflow.split_plan import BatchSource, SplitPlan, SplitRefused
from gemini.tensorflow.twin_rest import RestShards, TwinRest

Block = tuple[str, int, int]
"""`F` or `B`, micro-batch, stage."""


class TwinGraph(TwinRest):
    """The twin of the steps that reach some notes, for one batch shape."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.block_of: dict[str, Block] = {}  # op of the twin → block
        self._block_name = re.compile(re.escape(self.prefix) + r"([FDW])(\d*)/S(\d+)/")

    def shard(
        self, plan: SplitPlan, sources: Mapping[str, BatchSource], micro_batches: int, stored: Iterable[str] = ()
    ) -> None:
        """Divide the forward part over the shards of its stages as well; reads `stored` exist in shards."""
        self.pieces = ShardedPieces(
            self.facts, plan, self._writer, self._mirror, self._placement, sources, micro_batches, stored
        )

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
        pairs = self._twin_sources(note)
        groups = [[graph.get_tensor_by_name(name) for name in self._source_names(source)] for source, _ in pairs]
        flat = [one for group in groups for one in group]
        taken = [graph.get_tensor_by_name(name) for name in sorted(self._sources & self.facts.tainted)]
        taken += [graph.get_tensor_by_name(source.name) for source, _ in pairs if source.op.name in self.plan.untouched]
        with graph.as_default():
            found = gradients_impl.gradients(
                tensors, flat, name=self.prefix + "gradients", colocate_gradients_with_ops=True,
                stop_gradients=taken, **self._arguments(note.arguments),
            )  # fmt: skip
        self._place_gradients(graph.get_operations()[before:])
        rest = iter(found)
        self._map_gradients(pairs, [list(islice(rest, len(group))) for group in groups])

    def _twin_sources(self, note: GradientNote) -> list[tuple[Any, Any]]:
        """Return what the twin is differentiated by, with the gradients in the script's graph.

        In front of the ops that stay untouched, the script's own gradients go on with those of what these return.
        """
        untouched = self.plan.untouched
        before = {name for op in self.facts if op.name in untouched for name in op.inputs}
        inner = [(source, old) for source, old in note.inner if source.op.name in untouched]
        for source, _ in inner:
            if source.name in before:
                raise SplitRefused(f"{source.name} is read in front of random numbers of a loop or branch, and behind")
        pairs = zip(note.sources, note.gradients, strict=True)
        return [*((source, old) for source, old in pairs if source.name not in before), *inner]

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
        if source.op.name in self.plan.untouched:
            return [str(source.name)]
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
                before = {self.block_of[name][1] for tensor in op.inputs if (name := tensor.op.name) in self.block_of}
                if before <= {int(found[2])}:  # else it adds up those of several micro-batches
                    self.block_of[op.name] = ("B", int(found[2]), int(found[3]))
            device = self._device_of(base) or (self._placement.devices[int(found[3])] if found else "")
            if device:
                op._set_device(device)
                op._clear_attr("_class")

    def _map_gradients(self, pairs: Sequence[tuple[Any, Any]], found: Sequence[list[Any]]) -> None:
        import tensorflow.compat.v1 as tf

        for (source, old), parts in zip(pairs, found, strict=True):
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
