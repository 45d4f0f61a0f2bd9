"""Sums of shards that ops pass on: linear functions of one sum, and sums of sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemini.batch_analysis.batch_kinds import Kind, Partial, Replicate
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall
from gemini.tensor_parallel.rules.registry import batch_rule, shard_rule


@shard_rule("dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d")
def dropout(call: OpCall) -> Kind | Sequence[Kind]:
    """Every shard applies the mask of the whole to its part of a sum."""
    if isinstance(call.first.kind, Partial):
        return Partial()
    if call.name == "feature_dropout" or (call.name.startswith("dropout") and call.name != "dropout"):
        raise AnalysisRefused(f"{call.name} of slices")
    return batch_rule("dropout")(call)


@shard_rule("to", "type", "type_as", "_to_copy", "double", "float", "half", "bfloat16")
def cast(call: OpCall) -> Kind | Sequence[Kind]:
    """Keep sums under a cast to an equal or larger type; a smaller one would round every part."""
    value = call.first
    if isinstance(value.kind, Partial):
        made = call.out().dtype
        if not made.is_floating_point or torch.promote_types(made, value.dtype) != made:
            raise AnalysisRefused(f"{call.name} rounds the parts of a sum")
        if any(not other.is_constant for other in call.tensors() if other is not value):
            raise AnalysisRefused(f"{call.name} of a sum by the type of a divided tensor")
        return Partial()
    return batch_rule(call.name)(call)


@shard_rule("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
def like(call: OpCall) -> Kind | Sequence[Kind]:
    """Of a sum only shape and type are read."""
    if call.random:
        raise AnalysisRefused(f"{call.name} of slices")
    return Replicate() if isinstance(call.first.kind, Partial) else batch_rule("zeros_like")(call)


@shard_rule("index_add", "scatter_add")
def add_rows(call: OpCall) -> Kind | Sequence[Kind]:
    """`(x, dim, index, source)`: rows of a sum, added to a sum."""
    value, index, source = call.first, call.argument(2, "index"), call.argument(3, "source", call.kwargs.get("src"))
    if not value.is_sum and not source.is_sum:
        return batch_rule(call.name)(call)
    if value.kind != source.kind or not index.is_constant:
        raise AnalysisRefused(f"{call.name} of a sum and other values")
    return Partial()


@shard_rule("index_select", "gather", "cumsum", "flip", "roll", "tril", "triu", "pad", "constant_pad_nd",
            "repeat")  # fmt: skip
def linear_in_first(call: OpCall) -> Kind | Sequence[Kind]:
    """Linear functions of the first argument."""
    value = call.first
    if isinstance(value.kind, Partial):
        if any(not other.is_constant for other in call.tensors() if other is not value):
            raise AnalysisRefused(f"{call.name} of a sum by divided tensors")
        if call.name in ("pad", "constant_pad_nd") and (call.argument(3, "value") or 0) != 0:
            raise AnalysisRefused(f"{call.name} of a sum with a value")
        return Partial()
    return batch_rule(call.name)(call)
