"""Divided weights: linear layers, products with a bias, convolutions, norms per channel.

linear   weight (out, in)      out divided: columns of the result;  in divided: the result is a sum
addmm    c + a @ b             the same, with the weight transposed
conv     weight (out, in, …)   out divided: channels; in divided: a sum; groups: both; transposed: (in, out, …)
"""

from __future__ import annotations

from typing import Any

from gemini.batch_analysis.batch_kinds import Kind, Partial, Replicate, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, TensorValue
from gemini.batch_analysis.rules.matmul import contract
from gemini.batch_analysis.rules.shape_ops import move_shard
from gemini.tensor_parallel.rules.registry import batch_rule, shard_rule
from gemini.tensor_parallel.shard_query import ShardQuery

_LETTERS = "abcdefgh"


def add_bias(call: OpCall, kind: Kind, bias: Any, first: int) -> Kind:
    """Return the layout of a result to which a bias is added, whose dimension 0 is dimension `first` of the result."""
    if not isinstance(bias, TensorValue):
        return kind
    if isinstance(kind, Partial) or isinstance(bias.kind, Partial):
        if kind != bias.kind:
            raise AnalysisRefused(f"{call.name}: a sum needs a bias that is part of it")
        return kind
    assert isinstance(kind, Shard)
    at = kind.dim - first
    wanted = move_shard(kind, at) if 0 <= at < bias.rank and bias.shape[at] != 1 else Replicate()
    if bias.kind != wanted:
        raise AnalysisRefused(f"{call.name}: its bias is not divided as its result is")
    return kind


@shard_rule("linear")
def linear(call: OpCall) -> Kind:
    """`x @ weightᵀ + bias`."""
    value, weight, bias = call.first, call.argument(1, "weight"), call.argument(2, "bias")
    if weight.rank != 2:
        raise AnalysisRefused("linear with a vector as weight")
    rows = _LETTERS[: value.rank - 1]
    if value.is_constant and weight.is_constant:
        raise AnalysisRefused("linear with only its bias divided")
    return add_bias(call, contract(call, [rows + "k", "jk"], rows + "j", [value, weight]), bias, value.rank - 1)


@shard_rule("addmm", "baddbmm", "addmv")
def addmm(call: OpCall) -> Kind:
    """`c + a @ b`."""
    extra = call.first
    left = call.argument(1, "batch1", call.kwargs.get("mat1", call.kwargs.get("mat")))
    right = call.argument(2, "batch2", call.kwargs.get("mat2", call.kwargs.get("vec")))
    call.constant((call.kwargs.get("beta"), call.kwargs.get("alpha")))
    if left.is_constant and right.is_constant:
        raise AnalysisRefused(f"{call.name} with only its first argument divided")
    batch = "b" if left.rank == 3 else ""
    last = "" if right.rank == 1 else "j"
    kind = contract(call, [f"{batch}ik", f"{batch}k{last}"], f"{batch}i{last}", [left, right])
    return add_bias(call, kind, extra, len(call.out().shape) - extra.rank)


@shard_rule("conv1d", "conv2d", "conv3d")
def convolution(call: ShardQuery) -> Kind:
    """`(x, weight, bias, stride, padding, dilation, groups)`: channels and groups."""
    value, weight, bias = call.first, call.argument(1, "weight"), call.argument(2, "bias")
    groups = call.argument(6, "groups", 1)
    rank = value.rank
    if rank != weight.rank:
        raise AnalysisRefused(f"{call.name} without samples")
    if isinstance(value.kind, Partial) and weight.is_constant:
        return add_bias(call, value.kind, bias, 1)
    if groups != 1:
        return _grouped(call, value, weight, bias, groups)
    if value.is_constant and isinstance(weight.kind, Shard) and weight.kind.dim == 0:
        return add_bias(call, move_shard(weight.kind, 1), bias, 1)
    if isinstance(value.kind, Shard) and value.kind.dim == 1 and weight.kind == value.kind:
        return add_bias(call, Partial(), bias, 1)
    raise AnalysisRefused(f"{call.name} of other dimensions than channels")


@shard_rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(call: ShardQuery) -> Kind:
    """`(x, weight (in, out / groups, …), bias, stride, padding, output_padding, groups, dilation)`."""
    value, weight, bias = call.first, call.argument(1, "weight"), call.argument(2, "bias")
    groups = call.argument(6, "groups", 1)
    if value.rank != weight.rank:
        raise AnalysisRefused(f"{call.name} without samples")
    if isinstance(value.kind, Partial) and weight.is_constant:
        return add_bias(call, value.kind, bias, 1)
    if groups != 1:
        return _grouped(call, value, weight, bias, groups)
    if value.is_constant and isinstance(weight.kind, Shard) and weight.kind.dim == 1:
        return add_bias(call, weight.kind, bias, 1)
    if isinstance(value.kind, Shard) and value.kind.dim == 1 and weight.kind == move_shard(value.kind, 0):
        return add_bias(call, Partial(), bias, 1)
    raise AnalysisRefused(f"{call.name} of other dimensions than channels")


def _grouped(call: ShardQuery, value: TensorValue, weight: TensorValue, bias: Any, groups: int) -> Kind:
    """Divide whole groups."""
    if not isinstance(value.kind, Shard) or not isinstance(weight.kind, Shard) or groups % call.samples:
        raise AnalysisRefused(f"{call.name} of groups that do not divide")
    if value.kind.dim != 1 or weight.kind.dim != 0 or value.kind.outer != 1 or weight.kind.outer != 1:
        raise AnalysisRefused(f"{call.name} of other dimensions than groups of channels")
    place = [("k", "groups")] if "groups" in call.kwargs else [("i", 6)]
    call.divide(*place)
    return add_bias(call, Shard(1, call.out().shape[1] // call.samples), bias, 1)


@shard_rule("batch_norm", "instance_norm")
def channel_norm(call: OpCall) -> Kind:
    """Channels are the second dimension; statistics, weights and biases are divided as they are."""
    value = call.first
    kind = call.sample(value)
    if value.rank < 2 or kind.dim != 1:
        raise AnalysisRefused(f"{call.name} of another dimension than channels")
    for other in call.tensors():
        if other is not value and other.kind != move_shard(kind, 0):
            raise AnalysisRefused(f"{call.name} whose statistics and weights are not divided as its channels are")
    return kind


@shard_rule("group_norm")
def group_norm(call: ShardQuery) -> Kind:
    """Groups of channels."""
    value, groups = call.first, call.argument(1, "num_groups")
    kind = call.sample(value)
    if kind.dim != 1 or kind.outer != 1 or groups % call.samples:
        raise AnalysisRefused("group_norm of groups that do not divide")
    for other in call.tensors():
        if other is not value and other.kind != move_shard(kind, 0):
            raise AnalysisRefused("group_norm whose weights are not divided as its channels are")
    call.divide(*([("k", "num_groups")] if "num_groups" in call.kwargs else [("i", 1)]))
    return kind


@shard_rule("prelu")
def prelu(call: OpCall) -> Kind:
    """Entry by entry, with one weight, or one per channel."""
    value, weight = call.first, call.argument(1, "weight")
    kind = call.sample(value)
    wanted = move_shard(kind, 0) if kind.dim == 1 and weight.shape not in ((), (1,)) else Replicate()
    if weight.kind != wanted:
        raise AnalysisRefused("prelu whose weight is not divided as its channels are")
    return kind


@shard_rule("layer_norm", "rms_norm")
def layer_norm(call: OpCall) -> Kind:
    """Over the last dimensions, which stay whole, and so do its weights."""
    return batch_rule("layer_norm")(call)  # type: ignore[return-value]


@shard_rule("_weight_norm")
def weight_norm(call: OpCall) -> Kind:
    """`(direction, size, dim)`: a norm for each entry of a dimension."""
    kind, size = call.sample(call.first), call.argument(1, "g")
    if kind.dim != call.argument(2, "dim", 0) % call.first.rank or size.kind != kind:
        raise AnalysisRefused("weight_norm whose sizes are not divided as its weights are")
    return kind
