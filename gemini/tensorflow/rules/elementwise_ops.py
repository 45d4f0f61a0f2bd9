"""Rules of elementwise ops: a piece of the result from the same piece of every input, with broadcasting.

Linear ones also pass sums on: the sum of the results is the result of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.tensorflow.piece_layouts import PARTIAL, REPLICATE, Layout, Partial, Shard
from gemini.tensorflow.split_way import ForwardOp, Rule, Way, along, first_shard, has_partial

_LINEAR = ("Identity", "Neg", "StopGradient", "PreventGradient", "Snapshot", "DebugIdentity")
_SUMS = ("Add", "AddV2", "Sub", "AddN")
_PRODUCTS = ("Mul", "MulNoNan")
_QUOTIENTS = ("RealDiv", "Div", "DivNoNan")
_OTHERS_NAMES = """
    Abs Exp Expm1 Log Log1p Sqrt Rsqrt Square Tanh Sigmoid Relu Relu6 Elu Selu LeakyRelu Softplus Softsign Erf
    Erfc Erfinv Ndtri Lgamma Digamma Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh Floor Ceil Round
    Rint Sign Reciprocal Inv IsNan IsInf IsFinite LogicalNot Invert ZerosLike OnesLike CheckNumerics
    CheckNumericsV2 FloorDiv Mod FloorMod TruncateDiv TruncateMod Pow Maximum Minimum SquaredDifference Greater
    GreaterEqual Less LessEqual Equal NotEqual ApproximateEqual LogicalAnd LogicalOr Atan2 Xdivy Xlogy Xlog1py
    BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift SelectV2 Cast ClipByValue IdentityN Bucketize
    StringToHashBucketFast StringToHashBucketStrong StringToNumber StringLower StringUpper
    ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SoftplusGrad SoftsignGrad TanhGrad SigmoidGrad SqrtGrad
    RsqrtGrad ReciprocalGrad InvGrad
"""
_OTHERS = frozenset(_OTHERS_NAMES.split())


def broadcast(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Divide all inputs along the dimension of the result that the first divided input has."""
    del units
    found = first_shard(layouts)
    if found is None or any(shape is None for shape in (*op.in_shapes, *op.out_shapes)):
        return None
    at, layout = found
    shapes = [shape or () for shape in op.in_shapes]
    rank = len(op.out_shapes[0] or ())
    dim = layout.dim + rank - len(shapes[at])
    wanted: list[Layout] = []
    for shape in shapes:
        own = dim - rank + len(shape)
        wanted.append(Shard(own, layout.factor, layout.outer) if own >= 0 and shape[own] > 1 else REPLICATE)
    return Way(tuple(wanted), (Shard(dim, layout.factor, layout.outer),))


def linear(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Pass a sum on, else divide."""
    if isinstance(layouts[0], Partial):
        return Way((PARTIAL,), (PARTIAL,))
    return broadcast(op, layouts, units)


def sums(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Add sums part by part."""
    if all(isinstance(layout, Partial) for layout in layouts):
        return Way((PARTIAL,) * len(layouts), (PARTIAL,))
    return broadcast(op, layouts, units)


def products(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Multiply each part of a sum by a whole factor."""
    parts = [isinstance(layout, Partial) for layout in layouts]
    if any(parts) and not any(isinstance(layout, Shard) for layout in layouts):
        return along(layouts, parts.index(True), op, PARTIAL)
    return broadcast(op, layouts, units)


def quotients(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Divide each part of a sum by a whole divisor."""
    if isinstance(layouts[0], Partial) and not isinstance(layouts[1], Shard):
        return Way((PARTIAL, REPLICATE), (PARTIAL,))
    return broadcast(op, layouts, units)


def identities(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Pass several tensors on, each as it is."""
    del units
    return Way(tuple(layouts), tuple(layouts)) if len(op.outputs) == len(op.inputs) else None


def select(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Choose by entries, or by rows where the condition is a vector."""
    ranks = [op.rank(at) for at in range(3)]
    if None in ranks or len({*ranks}) == 1:
        return broadcast(op, layouts, units)
    found = first_shard(layouts)
    if found is None or found[1].dim != 0 or ranks[0] != 1:
        return None
    return Way((found[1],) * 3, (found[1],))


def bias(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Add a vector along the channels."""
    del units
    layout, shape = layouts[0], op.in_shapes[0]
    if not isinstance(layout, Shard) or shape is None:
        return None
    channel = 1 if op.text("data_format") == "NCHW" else len(shape) - 1
    vector: Layout = Shard(0, layout.factor, layout.outer) if layout.dim == channel else REPLICATE
    return Way((layout, vector), (layout,))


def lookup(op: ForwardOp, layouts: Sequence[Layout], units: int) -> Way | None:
    """Look keys up in a table."""
    del units
    return None if has_partial(layouts) or not isinstance(layouts[1], Shard) else along(layouts, 1, op, layouts[1])


RULES: dict[str, Rule] = {
    **dict.fromkeys(_OTHERS, broadcast),
    **dict.fromkeys(_LINEAR, linear),
    **dict.fromkeys(_SUMS, sums),
    **dict.fromkeys(_PRODUCTS, products),
    **dict.fromkeys(_QUOTIENTS, quotients),
    "IdentityN": identities,
    "Select": select,
    "BiasAdd": bias,
    "LookupTableFindV2": lookup,
}
