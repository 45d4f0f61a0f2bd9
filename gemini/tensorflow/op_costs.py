"""Op costs: the time of a forward op, from its shapes: arithmetic and bytes moved, at the speed of one CPU core."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from gemini.tensorflow.piece_layouts import Shape
from gemini.tensorflow.split_way import ForwardOp

_OPERATIONS_PER_MS = 2e7
_BYTES_PER_MS = 5e6
_OVERHEAD_MS = 0.004
_LOOP_TURNS = 30  # of a loop whose length is unknown
_ENTRY_BYTES = 4


def forward_ms(op: ForwardOp) -> float:
    """Return the time of the forward pass of an op; backward takes about twice as long."""
    moved = sum(prod(shape) for shape in (*op.in_shapes, *op.out_shapes) if shape is not None) * _ENTRY_BYTES
    loops = _LOOP_TURNS if op.type in ("While", "StatelessWhile") else 1
    return _OVERHEAD_MS + loops * (_operations(op) / _OPERATIONS_PER_MS + moved / _BYTES_PER_MS)


def result_mb(name: str, shape_of: Mapping[str, Shape | None]) -> float:
    """Return the size of a tensor in MB; 0 where it is unknown."""
    shape = shape_of.get(name)
    return 0.0 if shape is None else prod(shape) * _ENTRY_BYTES / (1 << 20)


def _operations(op: ForwardOp) -> float:
    out = op.out_shapes[0] if op.out_shapes else None
    if out is None or not op.in_shapes or op.in_shapes[0] is None:
        return 0.0
    if op.type == "MatMul":
        return 2.0 * prod(out) * op.in_shapes[0][0 if op.flag("transpose_a") else 1]
    if op.type.startswith("BatchMatMul"):
        return 2.0 * prod(out) * op.in_shapes[0][-2 if op.flag("adj_x") else -1]
    if op.type == "Einsum":
        return 2.0 * prod(out) * op.in_shapes[0][-1]
    if op.type in ("Conv2D", "Conv3D") and op.in_shapes[1] is not None:
        return 2.0 * prod(out) * prod(op.in_shapes[1][:-1])
    if op.type in ("While", "StatelessWhile"):  # products of the state with the weights that it reads
        return sum(2.0 * prod(shape) for shape in op.in_shapes if shape is not None and len(shape) == 2)
    return 0.0
