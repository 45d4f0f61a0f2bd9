"""Rules of ops that move entries: reshapes, transposes, slices, joins, copies.

Sizes in their operands are those of the whole batch, known here as constants; on pieces they become those of the piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemini.tensorflow.piece_layouts import PARTIAL, Layout, Partial, Shard, reshaped
from gemini.tensorflow.rules.op_letters import ALPHABET, Letters, align, by_letters, keep, name_dims, without
from gemini.tensorflow.split_way import ForwardOp, Rule, Way, along


def reshape(op: ForwardOp, layouts: Sequence[Layout]) -> Way | None:
    """Keep the units in one dimension of the result; also expand and squeeze."""
    layout, before, after = layouts[0], op.in_shapes[0], op.out_shapes[0]
    sized = 1 if op.type == "Reshape" else None
    if isinstance(layout, Partial) and after is not None:
        return along(layouts, 0, op, PARTIAL)
    if not isinstance(layout, Shard) or before is None or after is None:
        return None
    result = reshaped(layout, before, after)
    return None if result is None else along(layouts, 0, op, result, shape_input=sized)


@by_letters
def transpose(op: ForwardOp) -> Letters | None:
    """Move the dimensions."""
    dims, order = name_dims(op), op.values[1]
    if dims is None or order is None:
        return None
    return keep(op, 0, "".join(dims[int(one)] for one in order), linear=(0,))


@by_letters
def pack(op: ForwardOp) -> Letters | None:
    """Stack tensors along a new dimension."""
    dims, shape = name_dims(op), op.out_shapes[0]
    if dims is None or shape is None:
        return None
    axis = op.number("axis") % len(shape)
    return Letters((dims,) * len(op.inputs), (f"{dims[:axis]}.{dims[axis:]}",))


@by_letters
def unpack(op: ForwardOp) -> Letters | None:
    """Unstack another dimension."""
    dims = name_dims(op)
    return keep(op, 0, without(dims, [op.number("axis")])) if dims else None


def concat(op: ForwardOp, layouts: Sequence[Layout]) -> Way | None:
    """Join along another dimension, or along the divided one: then every input is a group of its own."""
    axis, shape, first = op.values[-1], op.out_shapes[0], layouts[0]
    if axis is None or shape is None or any(isinstance(layout, Partial) for layout in layouts):
        return None
    count, at = len(layouts) - 1, int(axis) % len(shape)
    if isinstance(first, Shard) and first.dim == at and first.outer == 1 and set(layouts[:-1]) == {first}:
        return Way(tuple(layouts), (Shard(at, first.factor, count),))
    dims = without(ALPHABET[: len(shape)], [at], ".")
    return by_letters(lambda _: Letters((*(dims,) * count, None), (dims,)))(op, layouts)


@by_letters
def split(op: ForwardOp) -> Letters | None:
    """Split another dimension."""
    value, axis = (1, op.values[0]) if op.type == "Split" else (0, op.values[2])
    dims = name_dims(op, value)
    return keep(op, value, without(dims, [int(axis)])) if dims and axis is not None else None


@by_letters
def cut(op: ForwardOp) -> Letters | None:
    """Slice other dimensions."""
    before, after, start = op.in_shapes[0], op.out_shapes[0], op.values[1]
    if before is None or after is None or start is None:
        return None
    changed = [dim for dim, size in enumerate(before) if size != after[dim] or start[dim]]
    dims = without(ALPHABET[: len(before)], changed, ".")
    return keep(op, 0, dims, dims, more={"shape_input": 2})


@by_letters
def strided_slice(op: ForwardOp) -> Letters | None:
    """Slice, drop or add other dimensions; the divided one is taken in full."""
    shape = op.in_shapes[0]
    if shape is None or any(value is None for value in op.values[1:4]):
        return None
    begin, end, strides = ([int(one) for one in value] for value in op.values[1:4])
    masks = {name: op.number(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}

    def has(name: str, at: int) -> bool:
        return bool(masks[name] >> at & 1)

    count = len(begin)
    ellipsis = next((at for at in range(count) if has("ellipsis", at)), count)
    taken = sum(at != ellipsis and not has("new_axis", at) for at in range(count))
    result, source = "", 0
    for at in range(count + (ellipsis == count)):
        if at == ellipsis:
            rest = len(shape) - taken
            result, source = result + ALPHABET[source : source + rest], source + rest
        elif has("new_axis", at):
            result += "."
        else:
            starts = has("begin", at) or begin[at] in (0, -shape[source])
            stops = has("end", at) or end[at] >= shape[source]
            if not has("shrink_axis", at):
                result += ALPHABET[source] if starts and stops and strides[at] == 1 else "."
            source += 1
    return keep(op, 0, result)


@by_letters
def pad(op: ForwardOp) -> Letters | None:
    """Pad other dimensions."""
    dims, sizes = name_dims(op), op.values[1]
    if dims is None or sizes is None:
        return None
    return keep(op, 0, without(dims, [dim for dim in range(len(dims)) if np.any(sizes[dim])], "."))


def tile(op: ForwardOp, layouts: Sequence[Layout]) -> Way | None:
    """Repeat; copies along the divided dimension are further groups."""
    layout, copies = layouts[0], op.values[1]
    if not isinstance(layout, Shard) or copies is None:
        return None
    return along(layouts, 0, op, Shard(layout.dim, layout.factor, layout.outer * int(copies[layout.dim])))


@by_letters
def broadcast_to(op: ForwardOp) -> Letters | None:
    """Broadcast to the shape of the piece."""
    before, after = op.in_shapes[0], op.out_shapes[0]
    if before is None or after is None:
        return None
    dims = align(len(before), len(after))
    return keep(op, 0, align(len(after), len(after)), dims, more={"shape_input": 1})


@by_letters
def other_dims(op: ForwardOp) -> Letters | None:
    """Reverse or accumulate along other dimensions."""
    dims, axes = name_dims(op), op.values[2 if op.type == "Roll" else 1]
    return keep(op, 0, without(dims, [int(one) for one in np.ravel(axes)], ".")) if dims and axes is not None else None


@by_letters
def reverse_sequence(op: ForwardOp) -> Letters | None:
    """Reverse the beginning of every row."""
    dims = name_dims(op)
    if dims is None:
        return None
    result = without(dims, [op.number("seq_dim")], ".")
    return Letters((result, dims[op.number("batch_dim")]), (result,))


@by_letters
def matrices(op: ForwardOp) -> Letters | None:
    """Work on every matrix of a stack, or make one of every vector."""
    dims, rows = name_dims(op), 1 if op.type == "MatrixDiag" else 2
    return keep(op, 0, dims[:-rows] + "..") if dims else None


@by_letters
def one_hot(op: ForwardOp) -> Letters | None:
    """Add a dimension for the classes."""
    dims, axis = name_dims(op), op.number("axis")
    if dims is None:
        return None
    axis = len(dims) if axis == -1 else axis
    return keep(op, 0, f"{dims[:axis]}.{dims[axis:]}")


@by_letters
def space(op: ForwardOp) -> Letters | None:
    """Move entries between space and channels, image by image."""
    return keep(op, 0, "a...")


def join_only(op: ForwardOp, layouts: Sequence[Layout]) -> Way | None:
    """Take whole inputs."""
    del op, layouts
    return None


_WHOLE = """
    Where Unique UniqueV2 UniqueWithCounts Range LinSpace Fill Shape ShapeN Size Rank InvertPermutation
    MatrixDiagV3 MatrixDiagPart MatrixDiagPartV3 MatrixSetDiag MatrixSetDiagV3 MatrixInverse Cholesky Diag
    DiagPart DynamicPartition DynamicStitch ParallelDynamicStitch ListDiff SpaceToBatchND BatchToSpaceND
    ScatterNd TensorScatterUpdate TensorScatterAdd UnsortedSegmentSum UnsortedSegmentMax UnsortedSegmentMean
    SegmentSum SegmentMean SegmentMax BroadcastArgs BroadcastGradientArgs ConcatOffset StatelessWhile While
    StatelessIf If SparseToDense Bincount DenseBincount HistogramFixedWidth ConfusionMatrix Const EnsureShape
    TensorListReserve TensorListFromTensor TensorListStack TensorListGetItem TensorListSetItem TensorListLength
    EmptyTensorList TensorListPushBack TensorListPopBack TensorListElementShape AsString StringJoin
    ComputeAccidentalHits
"""
_BY_RULE: dict[Rule, str] = {
    reshape: "Reshape ExpandDims Squeeze", transpose: "Transpose", pack: "Pack", unpack: "Unpack", concat: "ConcatV2",
    split: "Split SplitV", cut: "Slice", strided_slice: "StridedSlice", pad: "Pad PadV2 MirrorPad", tile: "Tile",
    broadcast_to: "BroadcastTo", other_dims: "ReverseV2 Cumsum Cumprod Roll", reverse_sequence: "ReverseSequence",
    matrices: "MatrixBandPart MatrixDiag", one_hot: "OneHot", space: "SpaceToDepth DepthToSpace", join_only: _WHOLE,
}  # fmt: skip
RULES: dict[str, Rule] = {kind: rule for rule, names in _BY_RULE.items() for kind in names.split()}
