"""Rules of the ops of layers: products, convolutions, pooling, normalization, softmax, look-ups, reductions.

A contraction of two inputs that are divided along it gives a sum to be made; so does a sum over a divided dimension. A
mean becomes a sum with the factor of the whole count, so that pieces of any size are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from gemini.tensorflow.piece_layouts import PARTIAL, REPLICATE, Layout, Partial, Replicate, Shard
from gemini.tensorflow.split_way import ForwardOp, Rule, Way, along, first_shard, has_partial

_IMAGES_NAMES = """
    Conv2D Conv3D DepthwiseConv2dNative MaxPool MaxPoolV2 AvgPool MaxPool3D AvgPool3D LRN Dilation2D
    ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea AdjustContrastv2
"""
_IMAGES = frozenset(_IMAGES_NAMES.split())


# ── products ───────────────────────────────────────────────────────────────────────────────────────────────────────
def product_labels(op: ForwardOp) -> tuple[list[str], str] | None:
    """Return a letter per dimension of both inputs and of the result of a product; None where they are unknown."""
    if op.type == "Einsum":
        equation = op.text("equation").replace(" ", "")
        if "..." in equation or "->" not in equation:
            return None
        inputs, _, output = equation.partition("->")
        return inputs.split(","), output
    left, right = op.rank(0), op.rank(1)
    if left is None or right is None:
        return None
    flags = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    stack = "abcdefghijklmnopqr"[: max(left, right) - 2]
    sides = []
    for own, flag, pair in ((left, flags[0], "xy"), (right, flags[1], "yz")):
        sides.append(stack[len(stack) + 2 - own :] + (pair[::-1] if op.flag(flag) else pair))
    return sides, stack + "xz"


def product(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Multiply matrices, stacks of them, or tensors by labels."""
    del units
    found = product_labels(op)
    return None if found is None else _contract(op, layouts, *found)


def _contract(op: ForwardOp, layouts: Sequence[Layout], sides: list[str], result: str) -> Way | None:
    """Divide along one label: of the result, or one that is summed over."""
    if has_partial(layouts):
        whole = [isinstance(layout, Replicate) for layout in layouts]
        at = next(at for at, layout in enumerate(layouts) if isinstance(layout, Partial))
        return along(layouts, at, op, PARTIAL) if sum(whole) == len(whole) - 1 else None
    found = first_shard(layouts)
    if found is None:
        return None
    at, layout = found
    label = sides[at][layout.dim]
    wanted: list[Layout] = []
    for labels, shape in zip(sides, op.in_shapes, strict=True):
        place = labels.find(label)
        is_there = place >= 0 and shape is not None and (shape[place] > 1 or labels == sides[at])
        wanted.append(Shard(place, layout.factor, layout.outer) if is_there else REPLICATE)
    if any(labels.count(label) > 1 for labels in (*sides, result)):
        return None
    if label in result:
        return Way(tuple(wanted), (Shard(result.index(label), layout.factor, layout.outer),))
    if any(label not in labels for labels in sides):
        return None
    return Way(tuple(wanted), (PARTIAL,))


# ── images ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def images(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Convolve, pool or resize image by image; pool also channel by channel."""
    del units
    layout = layouts[0]
    if not isinstance(layout, Shard):
        return None
    is_pool = op.type in ("MaxPool", "AvgPool") and op.text("data_format") == "NHWC"
    return along(layouts, 0, op, layout) if layout.dim == 0 or (is_pool and layout.dim == 3) else None


def transposed_convolution(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Convolve backwards: the sizes of the result are an operand."""
    del units
    layout = layouts[2]
    if not isinstance(layout, Shard) or layout.dim != 0 or op.out_shapes[0] is None:
        return None
    return along(layouts, 2, op, layout, shape_input=0)


def batch_norm(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Normalize: in training by the statistics of the whole batch, so once, with the result cut again."""
    del units
    layout = layouts[0]
    if not isinstance(layout, Shard) or layout.dim != 0:
        return None
    rest = (REPLICATE,) * (len(op.outputs) - 1)
    if op.flag("is_training"):
        return Way((REPLICATE,) * len(layouts), (layout, *rest), is_whole=True)
    return replace(along(layouts, 0, op, REPLICATE), outputs=(layout, *rest))


# ── rows ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def rows(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Work along the last dimension of every row."""
    del units
    found = first_shard(layouts)
    if found is None or has_partial(layouts):
        return None
    at, layout = found
    rank = op.rank(at)
    if rank is None or layout.dim >= rank - 1:
        return None
    return along(layouts, at, op, layout)


def cross_entropy(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Compare rows of logits with their labels."""
    del units
    found = first_shard(layouts)
    if found is None or found[1].dim != 0 or any(shape is None for shape in op.in_shapes):
        return None
    count = (op.in_shapes[found[0]] or (0,))[0]
    wanted = tuple(found[1] if shape and shape[0] == count else REPLICATE for shape in op.in_shapes)
    if op.type == "InTopKV2":
        wanted = (*wanted[:2], REPLICATE)
    return Way(wanted, (found[1],) * len(op.outputs))


def gather(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Look rows up: divided indices in a whole table, or rows of a piece by indices that stay within it."""
    table, indices = layouts[0], layouts[1]
    batch = op.number("batch_dims") if "batch_dims" in op.attributes else 0
    axis = 0 if op.type in ("ResourceGather", "Gather") else op.values[2]
    if axis is None or op.rank(1) is None or has_partial(layouts):
        return None
    axis = int(axis)
    if batch:
        return _batched_gather(layouts, batch)
    if isinstance(indices, Shard) and isinstance(table, Replicate):
        return along(layouts, 1, op, Shard(axis + indices.dim, indices.factor, indices.outer))
    if isinstance(table, Shard) and isinstance(indices, Replicate) and op.rank(0) is not None:
        axis %= op.rank(0) or 1
        if table.dim != axis:
            dim = table.dim + ((op.rank(1) or 0) - 1 if table.dim > axis else 0)
            return along(layouts, 0, op, Shard(dim, table.factor, table.outer))
    if isinstance(table, Shard) and isinstance(indices, Shard) and axis == table.dim == 0 and table.outer == 1:
        result = Shard(indices.dim, indices.factor, indices.outer)
        more = (REPLICATE,) * (len(layouts) - 2)
        return Way((table, indices, *more), (result,), row_input=1)
    del units
    return None


def _batched_gather(layouts: Sequence[Layout], batch: int) -> Way | None:
    found = first_shard(layouts)
    if found is None or found[1].dim >= batch:
        return None
    return Way((found[1], found[1], *((REPLICATE,) * (len(layouts) - 2))), (found[1],))


def gather_nd(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Look entries up: divided indices in a whole table."""
    del units
    table, indices, rank = layouts[0], layouts[1], op.rank(1)
    if not isinstance(indices, Shard) or not isinstance(table, Replicate) or rank is None or indices.dim >= rank - 1:
        return None
    return along(layouts, 1, op, indices)


# ── reductions ─────────────────────────────────────────────────────────────────────────────────────────────────────
def reduction(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Reduce other dimensions; over the divided one, sums and means give a sum to be made."""
    del units
    layout, shape, axes = layouts[0], op.in_shapes[0], op.values[1]
    if axes is None or shape is None:
        return None
    reduced = {int(one) % len(shape) for one in np.ravel(axes)} if len(shape) else set()
    if isinstance(layout, Partial):
        return along(layouts, 0, op, PARTIAL) if op.type in ("Sum", "Mean") else None
    if not isinstance(layout, Shard):
        return None
    if layout.dim in reduced:
        if op.type == "Sum":
            return along(layouts, 0, op, PARTIAL)
        if op.type == "Mean" and not _is_integer(op):
            scale = 1.0 / max(prod(shape[dim] for dim in reduced), 1)
            return along(layouts, 0, op, PARTIAL, type="Sum", scale=scale)
        return None
    gone = 0 if op.flag("keep_dims") else sum(dim < layout.dim for dim in reduced)
    return along(layouts, 0, op, Shard(layout.dim - gone, layout.factor, layout.outer))


def _is_integer(op: ForwardOp) -> bool:
    return int(op.attributes["T"].type) in {3, 4, 5, 6, 9, 17, 22, 23}  # DT_INT32 … DT_UINT64


def arg_reduction(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Find the place of the largest or smallest entry along another dimension."""
    del units
    layout, shape, axis = layouts[0], op.in_shapes[0], op.values[1]
    if not isinstance(layout, Shard) or shape is None or axis is None:
        return None
    axis = int(axis) % len(shape)
    if axis == layout.dim:
        return None
    return along(layouts, 0, op, Shard(layout.dim - (axis < layout.dim), layout.factor, layout.outer))


def half_square(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Sum half the squares."""
    del units
    return along(layouts, 0, op, PARTIAL) if isinstance(layouts[0], Shard) else None


RULES: dict[str, Rule] = {
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"), product),
    **dict.fromkeys(_IMAGES, images),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), transposed_convolution),
    **dict.fromkeys(("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), batch_norm),
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopK", "TopKV2"), rows),
    **dict.fromkeys(
        ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits", "InTopK", "InTopKV2"), cross_entropy
    ),
    **dict.fromkeys(("GatherV2", "Gather", "ResourceGather"), gather),
    "GatherNd": gather_nd,
    **dict.fromkeys(("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm"), reduction),
    **dict.fromkeys(("ArgMax", "ArgMin"), arg_reduction),
    "L2Loss": half_square,
}
