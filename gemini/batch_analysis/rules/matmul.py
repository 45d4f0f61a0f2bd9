"""Products: matrix products, linear layers, convolutions, einsum. Samples may be rows, or a batch of matrices; summed
over samples of both factors, a product is additive over micro-batches."""

from __future__ import annotations

from gemini.batch_analysis.batch_kinds import Kind, Partial, Shard, WeightedPartial
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, TensorValue
from gemini.batch_analysis.rules.pointwise import broadcast_kinds
from gemini.batch_analysis.rules.registry import rule
from gemini.batch_analysis.rules.shape_ops import move_shard


@rule("linear", "addmm_linear")
def linear(call: OpCall) -> Kind:
    """Rows times a matrix: the last dimension must not be the samples'."""
    value = call.first
    call.only(value)
    if isinstance(value.kind, WeightedPartial) or (
        isinstance(value.kind, Partial) and call.argument(2, "bias") is None
    ):
        return value.kind
    kind = call.sample(value)
    if kind.dim == value.rank - 1:
        raise AnalysisRefused("a linear layer over the samples")
    return kind


def contract(call: OpCall, terms: list[str], target: str, values: list[TensorValue]) -> Kind:
    """The kind of an einsum: `terms` are the letters of each operand."""
    if any(value.is_sum for value in values):
        varying = [value for value in values if not value.is_constant]
        if len(varying) == 1:
            return varying[0].kind
        raise AnalysisRefused(f"{call.name} of a sum over the batch and another")
    letter, layout = "", (1, 1)
    for term, value in zip(terms, values, strict=True):
        if value.is_constant:
            continue
        kind = call.sample(value)
        if letter and (term[kind.dim], (kind.factor, kind.outer)) != (letter, layout):
            raise AnalysisRefused(f"{call.name} of samples in different dimensions")
        letter, layout = term[kind.dim], (kind.factor, kind.outer)
    for term, value in zip(terms, values, strict=True):
        if letter in term and value.is_constant and value.shape[term.index(letter)] != 1:
            call.must_be(value, Shard(term.index(letter), *layout))
        if term.count(letter) > 1:
            raise AnalysisRefused(f"{call.name} along the samples twice")
    return Shard(target.index(letter), *layout) if letter in target else Partial()


@rule("einsum")
def einsum(call: OpCall) -> Kind:
    """By its letters; an ellipsis is written out."""
    equation, values = call.args[0], list(call.args[1:])
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        values = list(values[0])
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    hidden = "ABCDEFGHIJ"
    if "..." in equation:
        if any(letter in equation for letter in hidden):
            raise AnalysisRefused("an einsum with an ellipsis and capital letters")
        counts = [value.rank - len(term) + 3 for term, value in zip(terms, values, strict=True) if "..." in term]
        deep = max(counts)
        written = []
        for term, value in zip(terms, values, strict=True):
            own = hidden[deep - (value.rank - len(term) + 3) : deep] if "..." in term else ""
            written.append(term.replace("...", own))
        terms, right = written, right.replace("...", hidden[:deep])
        if not arrow:
            raise AnalysisRefused("an einsum with an ellipsis and no result")
    if not arrow:
        flat = "".join(terms)
        right = "".join(sorted(letter for letter in set(flat) if flat.count(letter) == 1))
    return contract(call, terms, right, values)


def _product(call: OpCall, left: TensorValue, right: TensorValue) -> Kind:
    """`left @ right` by letters: batch dimensions are aligned from the right."""
    batch = "ABCDEFGHIJ"[: max(left.rank - 2, right.rank - 2, 0)]
    deep = len(batch)
    one = "k" if left.rank == 1 else batch[deep - (left.rank - 2) :] + "ik"
    two = "k" if right.rank == 1 else batch[deep - (right.rank - 2) :] + "kj"
    target = batch + ("" if left.rank == 1 else "i") + ("" if right.rank == 1 else "j")
    return contract(call, [one, two], target, [left, right])


@rule("matmul", "bmm", "mm", "mv", "dot", "inner_", "vdot")
def matmul(call: OpCall) -> Kind:
    """`a @ b`."""
    return _product(call, call.first, call.argument(1, "other", call.kwargs.get("mat2", call.kwargs.get("tensor2"))))


@rule("rmatmul")
def rmatmul(call: OpCall) -> Kind:
    """`b @ a`, called on a."""
    return _product(call, call.argument(1, "other"), call.first)


@rule("baddbmm", "addmm", "addbmm_", "addmv")
def addmm(call: OpCall) -> Kind:
    """`c + a @ b`."""
    extra = call.first
    left = call.argument(1, "batch1", call.kwargs.get("mat1", call.kwargs.get("mat")))
    right = call.argument(2, "batch2", call.kwargs.get("mat2", call.kwargs.get("vec")))
    call.constant((call.kwargs.get("beta"), call.kwargs.get("alpha")))
    kind = _product(call, left, right) if not (left.is_constant and right.is_constant) else None
    rank = len(call.out().shape)
    if kind is None:
        return broadcast_kinds(call, [extra], rank)
    if not isinstance(kind, Shard):
        raise AnalysisRefused(f"{call.name} over the samples")
    if not extra.is_constant and move_shard(call.sample(extra), call.sample(extra).dim + rank - extra.rank) != kind:
        raise AnalysisRefused(f"{call.name} of samples in different dimensions")
    at = kind.dim - (rank - extra.rank)
    if extra.is_constant and at >= 0 and extra.shape[at] != 1:
        call.must_be(extra, move_shard(kind, at))
    return kind


@rule("outer", "ger")
def outer(call: OpCall) -> Kind:
    """Every entry of one vector with every entry of the other."""
    return contract(call, ["i", "j"], "ij", [call.args[0], call.args[1]])


@rule(
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "conv_tbc_"
)
def convolution(call: OpCall) -> Kind:
    """Require that samples are the first dimension, before channels and places."""
    value = call.first
    call.only(value)
    kind = call.sample(value)
    if kind.dim != 0 or value.rank != len(call.out().shape) or value.rank != call.argument(1, "weight").rank:
        raise AnalysisRefused(f"{call.name} whose first dimension is not the samples")
    return kind


@rule("bilinear")
def bilinear(call: OpCall) -> Kind:
    """Rows of two tensors and a constant."""
    one, two = call.args[:2]
    call.only(one, two)
    kind = broadcast_kinds(call, [one, two], one.rank)
    if isinstance(kind, Shard) and kind.dim == one.rank - 1:
        raise AnalysisRefused("bilinear over the samples")
    return kind


@rule("cdist")
def cdist(call: OpCall) -> Kind:
    """Distances of all rows of one to all rows of the other."""
    one, two = call.args[:2]
    return _product(
        call, one, TensorValue(two.key, _transpose(two), (*two.shape[:-2], two.shape[-1], two.shape[-2]), two.dtype)
    )


def _transpose(value: TensorValue) -> Kind:
    if not isinstance(value.kind, Shard):
        return value.kind
    if value.kind.dim == value.rank - 1:
        raise AnalysisRefused("cdist over the samples")
    return move_shard(value.kind, value.rank - 1) if value.kind.dim == value.rank - 2 else value.kind


@rule("kron", "cross_")
def refuse(call: OpCall) -> Kind:
    """Refuse the op."""
    raise AnalysisRefused(f"{call.name} of samples")
