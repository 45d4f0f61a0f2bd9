"""Rules of ops that move entries: reshapes, transposes, slices, joins, copies.

Sizes in their operands are those of the whole batch, known here as constants; on pieces they become those of the piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemini.tensorflow.piece_layouts import PARTIAL, REPLICATE, Layout, Partial, Shard, reshaped
from gemini.tensorflow.split_way import ForwardOp, Rule, Way, along, first_shard, has_partial


def reshape(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Keep the units in one dimension of the result; also expand and squeeze."""
    layout, before, after = layouts[0], op.in_shapes[0], op.out_shapes[0]
    sized = 1 if op.type == "Reshape" else None
    if isinstance(layout, Partial) and after is not None:
        return along(layouts, 0, op, PARTIAL)
    if not isinstance(layout, Shard) or before is None or after is None:
        return None
    result = reshaped(layout, before, after, units)
    return None if result is None else along(layouts, 0, op, result, shape_input=sized)


def transpose(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Move the dimension."""
    del units
    layout, order = layouts[0], op.values[1]
    if order is None:
        return None
    if isinstance(layout, Partial):
        return along(layouts, 0, op, PARTIAL)
    if not isinstance(layout, Shard):
        return None
    dim = [int(one) for one in order].index(layout.dim)
    return along(layouts, 0, op, Shard(dim, layout.factor, layout.outer))


def pack(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Stack tensors of one layout along a new dimension."""
    del units
    found, shape = first_shard(layouts), op.out_shapes[0]
    if found is None or shape is None:
        return None
    layout, axis = found[1], op.number("axis") % len(shape)
    dim = layout.dim + (axis <= layout.dim)
    return Way((layout,) * len(layouts), (Shard(dim, layout.factor, layout.outer),))


def unpack(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Unstack another dimension."""
    del units
    layout, shape = layouts[0], op.in_shapes[0]
    if not isinstance(layout, Shard) or shape is None:
        return None
    axis = op.number("axis") % len(shape)
    if axis == layout.dim:
        return None
    result = Shard(layout.dim - (axis < layout.dim), layout.factor, layout.outer)
    return Way((layout,), (result,) * len(op.outputs))


def concat(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Join along another dimension, or along the divided one: then every input is a group of its own."""
    del units
    found = first_shard(layouts)
    axis, shape = op.values[-1], op.out_shapes[0]
    if found is None or axis is None or shape is None or has_partial(layouts):
        return None
    layout, at = found[1], int(axis) % len(shape)
    count = len(layouts) - 1
    if layout.dim != at:
        return Way(((layout,) * count) + (REPLICATE,), (layout,))
    if layout.outer == 1 and all(one == layout for one in layouts[:-1]):
        return Way(tuple(layouts), (Shard(at, layout.factor, count),))
    return None


def split(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Split another dimension."""
    del units
    value, axis = (1, op.values[0]) if op.type == "Split" else (0, op.values[2])
    layout, shape = layouts[value], op.in_shapes[value]
    if not isinstance(layout, Shard) or axis is None or shape is None or int(axis) % len(shape) == layout.dim:
        return None
    return along(layouts, value, op, layout)


def cut(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Slice other dimensions."""
    del units
    layout, before, after = layouts[0], op.in_shapes[0], op.out_shapes[0]
    if not isinstance(layout, Shard) or before is None or after is None or op.values[1] is None:
        return None
    if before[layout.dim] != after[layout.dim] or int(op.values[1][layout.dim]) != 0:
        return None
    return along(layouts, 0, op, layout, shape_input=2)


def strided_slice(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Slice, drop or add other dimensions; the divided one is taken in full."""
    del units
    layout, shape = layouts[0], op.in_shapes[0]
    if not isinstance(layout, Shard) or shape is None or any(value is None for value in op.values[1:4]):
        return None
    dim = _sliced_dim(op, layout.dim, shape)
    return None if dim is None else along(layouts, 0, op, Shard(dim, layout.factor, layout.outer))


def _sliced_dim(op: ForwardOp, wanted: int, shape: Sequence[int]) -> int | None:
    """Return the dimension of the result that is the whole of dimension `wanted`."""
    begin, end, strides = ([int(one) for one in value] for value in op.values[1:4])
    masks = {name: op.number(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    count = len(begin)
    ellipsis = next((at for at in range(count) if masks["ellipsis"] >> at & 1), count)
    explicit = sum(1 for at in range(count) if at != ellipsis and not masks["new_axis"] >> at & 1)
    skipped = len(shape) - explicit
    source = result = 0
    for at in range(count + (ellipsis == count)):
        if at == ellipsis:
            if wanted < source + skipped:
                return result + wanted - source
            source, result = source + skipped, result + skipped
        elif masks["new_axis"] >> at & 1:
            result += 1
        else:
            is_shrunk = bool(masks["shrink_axis"] >> at & 1)
            if source == wanted:
                starts = masks["begin"] >> at & 1 or begin[at] in (0, -shape[source])
                stops = masks["end"] >> at & 1 or end[at] >= shape[source]
                return result if starts and stops and strides[at] == 1 and not is_shrunk else None
            source, result = source + 1, result + (not is_shrunk)
    return None


def pad(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Pad other dimensions."""
    del units
    layout, sizes = layouts[0], op.values[1]
    if not isinstance(layout, Shard) or sizes is None or np.any(sizes[layout.dim]):
        return None
    return along(layouts, 0, op, layout)


def tile(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Repeat; copies along the divided dimension are further groups."""
    del units
    layout, copies = layouts[0], op.values[1]
    if not isinstance(layout, Shard) or copies is None:
        return None
    return along(layouts, 0, op, Shard(layout.dim, layout.factor, layout.outer * int(copies[layout.dim])))


def broadcast_to(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Broadcast to the shape of the piece."""
    del units
    layout, before, after = layouts[0], op.in_shapes[0], op.out_shapes[0]
    if not isinstance(layout, Shard) or before is None or after is None:
        return None
    dim = layout.dim + len(after) - len(before)
    return along(layouts, 0, op, Shard(dim, layout.factor, layout.outer), shape_input=1)


def other_dims(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Reverse, accumulate or sort other dimensions."""
    del units
    layout, shape = layouts[0], op.in_shapes[0]
    if not isinstance(layout, Shard) or shape is None:
        return None
    if op.type in ("ReverseV2", "Cumsum", "Cumprod", "Roll"):
        axes = op.values[2 if op.type == "Roll" else 1]
        if axes is None or layout.dim in {int(one) % len(shape) for one in np.ravel(axes)}:
            return None
    elif op.type == "ReverseSequence":
        batch = op.number("batch_dim")
        if layout.dim == op.number("seq_dim"):
            return None
        lengths: Layout = Shard(0, layout.factor, layout.outer) if layout.dim == batch else REPLICATE
        return Way((layout, lengths), (layout,))
    elif layout.dim >= len(shape) - _INNER.get(op.type, 1):
        return None
    return along(layouts, 0, op, layout)


_INNER = {"MatrixBandPart": 2, "MatrixDiagV3": 1, "MatrixDiag": 1, "MatrixDiagPart": 2, "MatrixTranspose": 2}


def one_hot(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Add a dimension for the classes."""
    del units
    layout, shape = layouts[0], op.in_shapes[0]
    if not isinstance(layout, Shard) or shape is None:
        return None
    axis = op.number("axis")
    axis = len(shape) if axis == -1 else axis
    return along(layouts, 0, op, Shard(layout.dim + (axis <= layout.dim), layout.factor, layout.outer))


def space(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Move entries between space and channels, image by image."""
    del units
    layout = layouts[0]
    return along(layouts, 0, op, layout) if isinstance(layout, Shard) and layout.dim == 0 else None


def join_only(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Take whole inputs."""
    del op, layouts, units
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

RULES: dict[str, Rule] = {
    **dict.fromkeys(("Reshape", "ExpandDims", "Squeeze"), reshape),
    "Transpose": transpose,
    "Pack": pack,
    "Unpack": unpack,
    "ConcatV2": concat,
    **dict.fromkeys(("Split", "SplitV"), split),
    "Slice": cut,
    "StridedSlice": strided_slice,
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), pad),
    "Tile": tile,
    "BroadcastTo": broadcast_to,
    **dict.fromkeys(
        ("ReverseV2", "Cumsum", "Cumprod", "Roll", "ReverseSequence", "MatrixBandPart", "MatrixDiag"), other_dims
    ),
    "OneHot": one_hot,
    **dict.fromkeys(("SpaceToDepth", "DepthToSpace"), space),
    **dict.fromkeys(
        _WHOLE.split(),
        join_only,
    ),
}  # fmt: skip
