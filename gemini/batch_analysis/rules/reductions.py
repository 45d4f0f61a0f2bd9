"""Reductions: over other dimensions samples stay separate; over the batch dimension a sum is partial and a mean
is a weighted partial. Any other (maximum, norm, variance …) needs all samples at once.
"""

from __future__ import annotations

from typing import Any

from gemini.batch_analysis.batch_kinds import Kind, Partial, Shard, WeightedPartial
from gemini.batch_analysis.microbatch_weights import Weight
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, TensorValue, axes
from gemini.batch_analysis.rules.pointwise import broadcast_kinds
from gemini.batch_analysis.rules.registry import rule


def shard_after_reduction(kind: Shard, dims: tuple[int, ...], keepdim: bool) -> Shard | None:
    """Return the shard after dimensions are reduced; None if the batch dimension was."""
    if kind.dim in dims:
        return None
    lower = 0 if keepdim else sum(1 for dim in set(dims) if dim < kind.dim)
    return Shard(kind.dim - lower, kind.factor, kind.outer)


def reduce_dims(call: OpCall, value: TensorValue, dims: Any, keepdim: Any) -> Shard | None:
    """Return the shard that remains after `dims` are reduced."""
    call.only(value)
    call.constant((dims, keepdim))
    return shard_after_reduction(call.sample(value), axes(dims, value.rank), bool(keepdim))


@rule("sum", "nansum", "mean", "sum_to_size_", "count_nonzero")
def sum_or_mean(call: OpCall) -> Kind:
    """Sums and means."""
    value = call.first
    if value.is_sum:
        if call.name in ("nansum", "count_nonzero"):
            raise AnalysisRefused(f"{call.name} of a sum over the batch")
        return value.kind
    dims = call.argument(1, "dim", call.kwargs.get("axis"))
    found = reduce_dims(call, value, dims, call.argument(2, "keepdim", False))
    return found or (WeightedPartial(Weight()) if call.name == "mean" else Partial())


def _over(call: OpCall, dims: Any, keepdim: Any) -> Kind:
    found = reduce_dims(call, call.first, dims, keepdim)
    if found is None:
        raise AnalysisRefused(f"{call.name} over the samples of the batch")
    return found


@rule("amax", "amin", "logsumexp", "prod", "any", "all", "argmax", "argmin", "nanmean", "median", "nanmedian", "mode",
      "aminmax", "linalg_vector_norm_")  # fmt: skip
def along(call: OpCall) -> Kind:
    """`(x, dim, keepdim)`."""
    return _over(call, call.argument(1, "dim", call.kwargs.get("axis")), call.argument(2, "keepdim", False))


@rule("max", "min")
def extreme(call: OpCall) -> Kind:
    """Of one tensor along a dimension, or of two entry by entry."""
    if isinstance(call.argument(1, "other"), TensorValue):
        return broadcast_kinds(call, call.tensors(), len(call.out().shape))
    return _over(call, call.argument(1, "dim", call.kwargs.get("axis")), call.argument(2, "keepdim", False))


@rule("norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "quantile", "nanquantile", "kthvalue",
      "renorm_")  # fmt: skip
def norm(call: OpCall) -> Kind:
    """`(x, p, dim, keepdim)`."""
    default = (-2, -1) if call.name == "linalg_matrix_norm" else None
    return _over(call, call.argument(2, "dim", default), call.argument(3, "keepdim", False))


@rule("var", "std", "var_mean", "std_mean")
def variance(call: OpCall) -> Kind:
    """`(x, dim, …, keepdim)`; a bool in the place of dim means all dimensions."""
    dims = call.argument(1, "dim")
    dims = None if isinstance(dims, bool) else dims
    keepdim = call.kwargs.get("keepdim", call.args[3] if len(call.args) > 3 else False)
    return _over(call, dims, keepdim)
