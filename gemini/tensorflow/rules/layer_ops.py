"""Rules of the ops of layers: products, convolutions, pooling, normalization, softmax, look-ups, reductions.

A contraction of two inputs that are divided along it gives a sum to be made; so does a sum over a divided dimension. A
mean becomes a sum with the factor of the whole count, so that pieces of any size are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from gemini.tensorflow.piece_layouts import REPLICATE, Layout, Shard
from gemini.tensorflow.rules.op_letters import ALPHABET, Letters, by_letters, divide_op, keep, name_dims, without
from gemini.tensorflow.split_way import ForwardOp, Rule, Way, along

_INTEGERS = frozenset({3, 4, 5, 6, 9, 17, 22, 23})  # DT_INT32 … DT_UINT64


# ── products ───────────────────────────────────────────────────────────────────────────────────────────────────────
def product_letters(op: ForwardOp) -> Letters | None:
    """Return the letters of a product of two tensors; those of places in an image are dots."""
    if op.type == "Conv2D":
        return _convolution_letters(op)
    if op.type == "Einsum":
        inputs, arrow, output = op.text("equation").replace(" ", "").partition("->")
        sides = inputs.split(",")
        if not arrow or "..." in inputs + output:
            return None
    else:
        left, right = op.rank(0), op.rank(1)
        if left is None or right is None:
            return None
        flags = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
        stack, sides = ALPHABET[: max(left, right) - 2], []
        for own, flag, pair in ((left, flags[0], "xy"), (right, flags[1], "yz")):
            sides.append(stack[len(stack) + 2 - own :] + (pair[::-1] if op.flag(flag) else pair))
        output = stack + "xz"
    shared = set(sides[0]).intersection(*sides[1:]) - set(output)
    return Letters(tuple(sides), (output,), "".join(sorted(shared)), tuple(range(len(sides))))


def _convolution_letters(op: ForwardOp) -> Letters | None:
    image, filters = (shape or () for shape in op.in_shapes)
    if op.text("data_format") != "NHWC" or not image[3:] == filters[2:3] != ():
        return keep(op, 0, "n...", "n...")
    return Letters(("n..c", "..cf"), ("n..f",), "c")


# ── images ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@by_letters
def images(op: ForwardOp) -> Letters | None:
    """Convolve, pool or resize image by image; pool also channel by channel."""
    if op.type in ("MaxPool", "AvgPool") and op.text("data_format") == "NHWC":
        return keep(op, 0, "n..c", "n..c")
    dims = name_dims(op)
    return keep(op, 0, dims[0] + "." * (len(dims) - 1)) if dims else None


@by_letters
def transposed_convolution(op: ForwardOp) -> Letters | None:
    """Convolve backwards: the sizes of the result are an operand."""
    dims = name_dims(op, 2)
    return keep(op, 2, dims[0] + "." * (len(dims) - 1), more={"shape_input": 0}) if dims else None


def batch_norm(op: ForwardOp, layouts: Sequence[Layout]) -> Way | None:
    """Normalize: in training by the statistics of the whole batch, so once, with the result cut again."""
    layout = layouts[0]
    if not isinstance(layout, Shard) or layout.dim != 0:
        return None
    rest = (REPLICATE,) * (len(op.outputs) - 1)
    if op.flag("is_training"):
        return Way((REPLICATE,) * len(layouts), (layout, *rest), is_whole=True)
    return replace(along(layouts, 0, op, REPLICATE), outputs=(layout, *rest))


# ── rows ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@by_letters
def rows(op: ForwardOp) -> Letters | None:
    """Work along the last dimension of every row."""
    dims = name_dims(op)
    return keep(op, 0, dims[:-1] + ".") if dims else None


@by_letters
def cross_entropy(op: ForwardOp) -> Letters | None:
    """Compare rows of logits with their labels."""
    if None in op.in_shapes:
        return None
    rows = max(op.in_shapes, key=lambda shape: len(shape or ())) or (0,)
    inputs = tuple("a" + "." * (len(shape) - 1) if shape and shape[0] == rows[0] else None for shape in op.in_shapes)
    if op.type == "InTopKV2":
        inputs = (*inputs[:2], None)
    return Letters(inputs, tuple("a" + "." * (len(shape or "a") - 1) for shape in op.out_shapes))


def gather(op: ForwardOp, layouts: Sequence[Layout]) -> Way | None:
    """Look rows up: divided indices in a whole table, or rows of a piece by indices that stay within it."""
    table, indices = layouts[0], layouts[1]
    batch = op.number("batch_dims") if "batch_dims" in op.attributes else 0
    axis = 0 if op.type in ("ResourceGather", "Gather") else op.values[2]
    rank, places = None if op.type == "ResourceGather" else op.rank(0), op.rank(1)
    if axis is None or places is None:
        return None
    rank = int(axis) + 1 if rank is None else rank  # at least
    axis = int(axis) % rank
    if isinstance(table, Shard) and isinstance(indices, Shard) and not batch and axis == table.dim == 0:
        if table.outer != 1:
            return None
        result = Shard(indices.dim, indices.factor, indices.outer)
        return Way((table, indices, *(REPLICATE,) * (len(layouts) - 2)), (result,), row_input=1)
    own, other = ALPHABET[:rank], ALPHABET[:batch] + ALPHABET[rank : rank + places - batch]
    result_dims = own[:axis] + other[batch:] + own[axis + 1 :]
    table_dims = None if op.type == "ResourceGather" else without(own, [axis], ".")
    rest = (None,) * (len(layouts) - 2)
    return divide_op(op, Letters((table_dims, other, *rest), (result_dims,)), layouts)


@by_letters
def gather_nd(op: ForwardOp) -> Letters | None:
    """Look entries up: divided indices in a whole table."""
    dims, shape = name_dims(op, 1), op.out_shapes[0]
    if not dims or shape is None:
        return None
    return keep(op, 1, dims[:-1] + "." * (len(shape) - len(dims) + 1))


# ── reductions ─────────────────────────────────────────────────────────────────────────────────────────────────────
@by_letters
def reduction(op: ForwardOp) -> Letters | None:
    """Reduce other dimensions; over the divided one, sums and means give a sum to be made."""
    shape, axes, dims = op.in_shapes[0], op.values[1], name_dims(op)
    if axes is None or shape is None or dims is None:
        return None
    reduced = {int(one) % len(shape) for one in np.ravel(axes)} if shape else set()
    result = without(dims, reduced, "." if op.flag("keep_dims") else "")
    if op.type not in ("Sum", "Mean"):
        return keep(op, 0, result)
    is_exact = op.type == "Sum" or int(op.attributes["T"].type) not in _INTEGERS
    scale = {"type": "Sum", "scale": 1.0 / max(prod(shape[dim] for dim in reduced), 1)} if op.type == "Mean" else {}
    return keep(op, 0, result, sums=dims if is_exact else "", linear=(0,), summed=scale)


@by_letters
def arg_reduction(op: ForwardOp) -> Letters | None:
    """Find the place of the largest or smallest entry along another dimension."""
    dims, axis = name_dims(op), op.values[1]
    return keep(op, 0, without(dims, [int(axis)])) if dims and axis is not None else None


@by_letters
def half_square(op: ForwardOp) -> Letters | None:
    """Sum half the squares."""
    dims = name_dims(op)
    return keep(op, 0, "", sums=dims) if dims else None


_BY_RULE: dict[Rule, str] = {
    by_letters(product_letters): "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum Conv2D",
    images: """
        Conv3D DepthwiseConv2dNative MaxPool MaxPoolV2 AvgPool MaxPool3D AvgPool3D LRN Dilation2D
        ResizeBilinear ResizeNearestNeighbor ResizeBicubic ResizeArea AdjustContrastv2
    """,
    transposed_convolution: "Conv2DBackpropInput Conv3DBackpropInputV2",
    batch_norm: "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3",
    rows: "Softmax LogSoftmax TopK TopKV2",
    cross_entropy: "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits InTopK InTopKV2",
    gather: "GatherV2 Gather ResourceGather",
    gather_nd: "GatherNd",
    reduction: "Sum Mean Max Min Prod All Any EuclideanNorm",
    arg_reduction: "ArgMax ArgMin",
    half_square: "L2Loss",
}
RULES: dict[str, Rule] = {kind: rule for rule, names in _BY_RULE.items() for kind in names.split()}
