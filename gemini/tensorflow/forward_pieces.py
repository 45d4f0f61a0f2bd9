"""Forward pieces: the forward part of a graph, written once more per micro-batch and stage.

    prefix of a name    content
    ─────────────────   ──────────────────────────────────────────────────────────────────────
    …/F2/S1/            micro-batch 2 on stage 1; differentiated, so there is a backward block too
    …/D2/S1/            the same for ops that depend on data alone
    …/W/S1/             once for the whole batch
    …/M/                joins and cuts

Tensors that depend on no source of the step, such as variables as they are read, are those of the untouched graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gemini.tensorflow.forward_facts import ForwardFacts
from gemini.tensorflow.graph_branches import branch_owner
from gemini.tensorflow.node_writer import NodeWriter
from gemini.tensorflow.piece_layouts import REPLICATE, Layout, Partial, Replicate, Shard, local_shape
from gemini.tensorflow.rules.registry import RANDOM, SAMPLERS
from gemini.tensorflow.split_plan import SplitPlan, SplitRefused
from gemini.tensorflow.split_way import ForwardOp, Way

_FLOATS = frozenset({1, 2, 14, 19})  # DT_FLOAT, DT_DOUBLE, DT_BFLOAT16, DT_HALF
_ADDED_AT_ONCE = 4


class ForwardPieces:
    """The pieces of all tensors, by name of the original tensor."""

    def __init__(
        self, facts: ForwardFacts, plan: SplitPlan, writer: NodeWriter, device_of: Callable[[str], tuple[int, str]]
    ) -> None:
        self.facts, self.plan, self._writer = facts, plan, writer
        self._device_of = device_of  # name of an op → stage, device
        self._pieces: dict[str, list[str]] = {}
        self._whole: dict[str, str] = {}
        self._moved: dict[tuple[str, Layout, str], list[str]] = {}
        self._read: dict[tuple[str, str], list[str]] = {}  # by reader's device
        self._stage: dict[str, int] = {}
        self._place: dict[str, str] = {}  # of a tensor: its device
        self.random_shapes: dict[str, Any] = {}  # tensors of the graph that steps must feed, with their values
        self.random: list[str] = []
        self.device_of_piece: Callable[[int, int], str] | None = None  # stage, piece → device
        self.sums: list[str] = []  # tensors that were added up over the pieces
        self.gathered: list[str] = []  # tensors that were concatenated
        self.shared: set[str] = set()  # whole tensors of the forward part that all pieces read
        self._translate: Callable[[str], str] | None = None

    def write(self, losses: Sequence[str] = ()) -> None:
        """Write all ops, and the whole losses."""
        for op in self.facts:
            stage, device = self._device_of(op.name)
            for name in op.outputs:
                self._place[name], self._stage[name] = device, stage
            way = self.plan.way_of[op.name]
            if op.type in RANDOM:
                self._take_random(op)
            elif op.name in self.plan.untouched:
                continue
            elif all(name in self.facts.value_of for name in op.outputs) and op.outputs:
                continue  # written as constants where something reads them
            elif way.is_whole and not any(map(self._is_new, op.inputs)) and not _needs_copy(op):
                continue
            elif way.is_whole:
                self._write_whole(op, way, stage, device)
            else:
                self._write_pieces(op, way, stage, device)

        for name in losses:
            self.whole(name)

    def flush(self) -> None:
        """Import what was written."""
        self._writer.flush()

    @property
    def joined(self) -> dict[str, str]:
        """All whole tensors so far."""
        return dict(self._whole)

    def continue_with(self, writer: NodeWriter, translate: Callable[[str], str]) -> None:
        """Write further joins elsewhere, of what the pieces have become by another rewriting."""
        self._writer, self._translate = writer, translate

    # ── tensors ────────────────────────────────────────────────────────────────────────────────────────────────────
    def whole(self, name: str) -> str:
        """Return the whole tensor."""
        if name not in self._whole:
            layout = self.plan.layout_of.get(name, REPLICATE)
            if name in self._pieces:
                self._whole[name] = self._join(name, layout)
            elif name in self.facts.value_of and name in self.facts.tainted:
                self._whole[name] = self._writer.constant(self.facts.value_of[name], self._place.get(name, ""))
            else:
                self._whole[name] = name
        return self._whole[name]

    def pieces(self, name: str, layout: Layout, reader: str = "") -> list[str]:
        """Return the pieces of a tensor in a layout, for an op on the device `reader`."""
        count = self.plan.count
        if isinstance(layout, Replicate):
            whole = self.whole(name)
            if self.device_of_piece is not None and self._is_activation(name):
                return self._copy_to_shards(name, whole)
            if name in self.facts.trained and name not in self._pieces and self.facts.type_of[name] in _FLOATS:
                return self._read_in_turn(name, whole, reader)
            return [whole] * count
        if name in self._pieces and self.plan.layout_of[name] == layout:
            return self._pieces[name]
        if isinstance(layout, Partial):
            raise TypeError(f"{name} as a sum")
        place = self._place.get(name, "")
        device = place if name in self.facts.trained or not reader else reader  # whole data is one message, not many
        if (name, layout, device) not in self._moved:
            self._moved[name, layout, device] = self._cut(name, layout, device)
        return self._moved[name, layout, device]

    def add_pieces(self, name: str, parts: list[str]) -> None:
        """Use tensors that exist as the pieces of one."""
        self._pieces[name] = parts

    def is_known(self, name: str) -> bool:
        """Whether the tensor belongs to the forward part."""
        return name in self.plan.layout_of

    def _is_new(self, name: str) -> bool:
        """Whether the untouched graph has another tensor than the pieces."""
        return name in self.facts.tainted or name in self._pieces or self._whole.get(name, name) != name

    def _is_activation(self, name: str) -> bool:
        has_gradient = name in self.facts.trained and name in self.facts.tainted
        return has_gradient and self.facts.type_of[name] in _FLOATS

    def _copy_to_shards(self, name: str, whole: str) -> list[str]:
        """Return a copy per shard: the gradients of its readers add up there, and one sum per shard leaves it."""
        if (key := (name, "")) not in self._read and self.device_of_piece is not None:
            self.shared.add(name)
            devices = [self.device_of_piece(self._stage.get(name, 0), at) for at in range(self.plan.count)]
            self._read[key] = [
                self._writer.add(
                    "Identity", self._writer.fresh("Copy"), [whole], device, T_type=self.facts.type_of[name]
                )
                for device in devices
            ]
        return self._read[key]

    def _read_in_turn(self, name: str, whole: str, reader: str) -> list[str]:
        """Return a variable per micro-batch, such that gradients add up on the reader's device, a few at a time.

        One by one, the sum would be read and written for each; all at once, each would be held until the last.
        """
        dtype, device = self.facts.type_of[name], self._place.get(name, "")
        key = (name, reader or device)
        if key not in self._read:
            chain: list[str] = []
            last, is_remote = whole, key[1] != device
            for at in range(self.plan.count):
                if at % _ADDED_AT_ONCE == 0 and (at or is_remote):
                    last = self._writer.add("Identity", self._writer.fresh("Read"), [last], key[1], T_type=dtype)
                chain.append(last)
            self._read[key] = chain[::-1]
        return self._read[key]

    def _join(self, name: str, layout: Layout) -> str:
        parts, dtype, device = self._pieces[name], self.facts.type_of[name], self._place.get(name, "")
        if self._translate is not None:
            parts = [self._translate(part) for part in parts]
        elif not isinstance(layout, Replicate):
            (self.sums if isinstance(layout, Partial) else self.gathered).append(name)
        if isinstance(layout, Partial):
            return self._writer.add_up(parts, dtype, device)
        if not isinstance(layout, Shard):
            return parts[0]
        shape = self.facts.shape_of[name] or ()
        if layout.outer == 1:
            return self._writer.concatenate(parts, layout.dim, dtype, device)
        grouped = [
            self._writer.reshape(part, self._grouped(shape, layout, size * layout.factor), dtype, device)
            for part, size in zip(parts, self.plan.sizes, strict=True)
        ]
        joined = self._writer.concatenate(grouped, layout.dim + 1, dtype, device)
        return self._writer.reshape(joined, shape, dtype, device)

    def _cut(self, name: str, layout: Shard, device: str) -> list[str]:
        dtype, shape = self.facts.type_of[name], self.facts.shape_of[name] or ()
        sizes = [size * layout.factor for size in self.plan.sizes]
        if name in self.facts.value_of:
            value = self.facts.value_of[name].reshape(self._grouped(shape, layout, sum(sizes)))
            cuts = np.split(value, np.cumsum(sizes)[:-1], layout.dim + 1)
            shapes = [local_shape(layout, shape, size) for size in self.plan.sizes]
            return [self._writer.constant(one.reshape(own), device) for one, own in zip(cuts, shapes, strict=True)]
        whole = self.whole(name)
        if layout.outer == 1:
            return self._writer.split(whole, sizes, layout.dim, dtype, device)
        grouped = self._writer.reshape(whole, self._grouped(shape, layout, sum(sizes)), dtype, device)
        cut = self._writer.split(grouped, sizes, layout.dim + 1, dtype, device)
        return [
            self._writer.reshape(one, local_shape(layout, shape, size), dtype, device)
            for one, size in zip(cut, self.plan.sizes, strict=True)
        ]

    @staticmethod
    def _grouped(shape: tuple[int, ...], layout: Shard, entries: int) -> tuple[int, ...]:
        return (*shape[: layout.dim], layout.outer, entries, *shape[layout.dim + 1 :])

    # ── ops ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _take_random(self, op: ForwardOp) -> None:
        """Use the op of the untouched graph, which draws for the whole batch; its size becomes a feed."""
        self.random.extend(op.outputs)
        if op.type in SAMPLERS and op.inputs[0] in self.facts.trained:
            raise SplitRefused(f"the random numbers of {op.name} depend on variables")
        if op.inputs and op.inputs[0] in self.facts.tainted and op.type not in SAMPLERS:
            self.random_shapes[op.inputs[0]] = op.values[0]

    def _write_whole(self, op: ForwardOp, way: Way, stage: int, device: str) -> None:
        name = f"{self._writer.prefix}W/S{stage}/{op.name}"
        self._writer.copy(self.facts.node_of[op.name], name, [self.whole(one) for one in op.inputs], device)
        for at, output in enumerate(op.outputs):
            self._whole[output] = f"{name}:{at}"
            if not isinstance(way.outputs[at], Replicate):
                self._pieces[output] = self._cut(output, way.outputs[at], device)  # type: ignore[arg-type]

    def _write_pieces(self, op: ForwardOp, way: Way, stage: int, device: str) -> None:
        node = self.facts.node_of[op.name]
        kind = "F" if any(name in self.facts.trained for name in op.inputs) else "D"
        inputs = [
            [] if at == way.shape_input else self.pieces(name, layout, device)
            for at, (name, layout) in enumerate(zip(op.inputs, way.inputs, strict=True))
        ]
        made: list[list[str]] = [[] for _ in op.outputs]
        for piece, size in enumerate(self.plan.sizes):
            prefix = f"{self._writer.prefix}{kind}{piece}/S{stage}/"
            device = self.device_of_piece(stage, piece) if self.device_of_piece is not None else device
            operands = [one[piece] if one else "" for one in inputs]
            if way.shape_input is not None:
                shape = np.array(local_shape(way.outputs[0], op.out_shapes[0] or (), size), np.int32)
                operands[way.shape_input] = self._sized(node, op, shape, prefix, device)
            if way.row_input is not None:
                operands[way.row_input] = self._local_rows(op, way, operands[way.row_input], piece, prefix, device)
            self._writer.copy(node, prefix + op.name, operands, device, way.type)
            for at, results in enumerate(made):
                results.append(f"{prefix}{op.name}:{at}")
            if way.scale != 1.0:
                made[0][-1] = self._scaled(op, made[0][-1], way.scale, prefix, device)
        self._pieces.update(zip(op.outputs, made, strict=True))

    def _sized(self, node: Any, op: ForwardOp, shape: Any, prefix: str, device: str) -> str:
        key = {"Reshape": "Tshape", "Slice": "Index", "BroadcastTo": "Tidx"}.get(op.type)
        is_long = key is not None and node.attr[key].type == 9  # DT_INT64
        return self._writer.constant(
            shape.astype(np.int64 if is_long else np.int32), device, f"{prefix}{op.name}/shape"
        )

    def _local_rows(  # noqa: PLR0917
        self, op: ForwardOp, way: Way, index: str, piece: int, prefix: str, device: str
    ) -> str:
        """Subtract the first row of the piece."""
        table = way.inputs[0]
        dtype = self.facts.type_of[op.inputs[way.row_input or 0]]
        first = sum(self.plan.sizes[:piece]) * (table.factor if isinstance(table, Shard) else 1)
        kind = np.int64 if dtype == 9 else np.int32
        start = self._writer.constant(kind(first), device, f"{prefix}{op.name}/first_row")
        return self._writer.add("Sub", f"{prefix}{op.name}/rows", [index, start], device, T_type=dtype)

    def _scaled(self, op: ForwardOp, value: str, scale: float, prefix: str, device: str) -> str:
        import tensorflow.compat.v1 as tf

        dtype = self.facts.type_of[op.outputs[0]]
        factor = np.array(scale).astype(tf.as_dtype(dtype).as_numpy_dtype)
        operand = self._writer.constant(factor, device, f"{prefix}{op.name}/weight")
        return self._writer.add("Mul", f"{prefix}{op.name}/weighted", [value, operand], device, T_type=dtype)


def _needs_copy(op: ForwardOp) -> bool:
    """Whether the op of the untouched graph must not be differentiated again."""
    return op.type in ("While", "StatelessWhile", "If", "StatelessIf") or branch_owner(op.name) != op.name
