"""Rules of elementwise ops: a piece of the result from the same piece of every input, with broadcasting.

Linear ones also pass sums on: the sum of the results is the result of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemini.tensorflow.piece_layouts import Layout
from gemini.tensorflow.rules.op_letters import Letters, align, by_letters, keep, name_dims
from gemini.tensorflow.split_way import ForwardOp, Rule, Way

_OTHERS = """
    Abs Exp Expm1 Log Log1p Sqrt Rsqrt Square Tanh Sigmoid Relu Relu6 Elu Selu LeakyRelu Softplus Softsign Erf
    Erfc Erfinv Ndtri Lgamma Digamma Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh Floor Ceil Round
    Rint Sign Reciprocal Inv IsNan IsInf IsFinite LogicalNot Invert ZerosLike OnesLike CheckNumerics
    CheckNumericsV2 FloorDiv Mod FloorMod TruncateDiv TruncateMod Pow Maximum Minimum SquaredDifference Greater
    GreaterEqual Less LessEqual Equal NotEqual ApproximateEqual LogicalAnd LogicalOr Atan2 Xdivy Xlogy Xlog1py
    BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift SelectV2 Cast ClipByValue Bucketize
    StringToHashBucketFast StringToHashBucketStrong StringToNumber StringLower StringUpper
    ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SoftplusGrad SoftsignGrad TanhGrad SigmoidGrad SqrtGrad
    RsqrtGrad ReciprocalGrad InvGrad
"""
_LINEAR: dict[str, dict[str, Any]] = {
    "Identity Neg StopGradient PreventGradient Snapshot DebugIdentity": {"linear": (0,)},
    "Add AddV2 Sub AddN": {"adds": True},
    "Mul MulNoNan": {"linear": (0, 1)},
    "RealDiv Div DivNoNan": {"linear": (0,)},
}


def _broadcast(**more: Any) -> Rule:
    def letters_of(op: ForwardOp) -> Letters | None:
        """Align the dimensions of all inputs with those of the result."""
        shape = op.out_shapes[0]
        if shape is None or None in op.in_shapes:
            return None
        inputs = tuple(align(len(one or ()), len(shape)) for one in op.in_shapes)
        return Letters(inputs, (align(len(shape), len(shape)),), **more)

    return by_letters(letters_of)


def identities(op: ForwardOp, layouts: Sequence[Layout]) -> Way | None:
    """Pass several tensors on, each as it is."""
    return Way(tuple(layouts), tuple(layouts)) if len(op.outputs) == len(op.inputs) else None


@by_letters
def select(op: ForwardOp) -> Letters | None:
    """Choose by entries, or by rows where the condition is a vector."""
    dims = [name_dims(op, at) for at in range(3)]
    return Letters(tuple(dims), (dims[1],)) if dims[1] is not None and None not in dims else None


@by_letters
def bias(op: ForwardOp) -> Letters | None:
    """Add a vector along the channels."""
    dims = name_dims(op)
    if dims is None:
        return None
    return Letters((dims, dims[1 if op.text("data_format") == "NCHW" else -1]), (dims,))


@by_letters
def lookup(op: ForwardOp) -> Letters | None:
    """Look keys up in a table."""
    dims = name_dims(op, 1)
    return None if dims is None else keep(op, 1, dims)


RULES: dict[str, Rule] = {
    **dict.fromkeys(_OTHERS.split(), _broadcast()),
    **{kind: _broadcast(**more) for names, more in _LINEAR.items() for kind in names.split()},
    "IdentityN": identities,
    "Select": select,
    "BiasAdd": bias,
    "LookupTableFindV2": lookup,
}
