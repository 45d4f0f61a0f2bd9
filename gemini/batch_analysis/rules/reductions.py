"""Reductions: over other dimensions they keep samples apart; over that of the samples a sum is additive and a mean has
shares. Any other (maximum, norm, variance …) sees all samples at once."""

from __future__ import annotations

from typing import Any

from gemini.batch_analysis.batch_kinds import Kind, Partial, Shard, WeightedPartial
from gemini.batch_analysis.microbatch_weights import Share
from gemini.batch_analysis.op_call import Call, Refused, Value, axes
from gemini.batch_analysis.rules.pointwise import aligned
from gemini.batch_analysis.rules.registry import rule


def kept(kind: Shard, reduced: tuple[int, ...], keepdim: bool) -> Shard | None:
    """The samples after dimensions are reduced; None if theirs was."""
    if kind.dim in reduced:
        return None
    lower = 0 if keepdim else sum(1 for dim in set(reduced) if dim < kind.dim)
    return Shard(kind.dim - lower, kind.factor, kind.outer)


def reduced(call: Call, value: Value, dims: Any, keepdim: Any) -> Shard | None:
    """The samples that remain, where `dims` are reduced."""
    call.only(value)
    call.constant((dims, keepdim))
    return kept(call.sample(value), axes(dims, value.rank), bool(keepdim))


@rule("sum", "nansum", "mean", "sum_to_size_", "count_nonzero")
def summed(call: Call) -> Kind:
    """Sums and means."""
    value = call.first
    if value.is_sum:
        if call.name in ("nansum", "count_nonzero"):
            raise Refused(f"{call.name} of a sum over the batch")
        return value.kind
    dims = call.given(1, "dim", call.kwargs.get("axis"))
    found = reduced(call, value, dims, call.given(2, "keepdim", False))
    return found or (WeightedPartial(Share()) if call.name == "mean" else Partial())


def _over(call: Call, dims: Any, keepdim: Any) -> Kind:
    found = reduced(call, call.first, dims, keepdim)
    if found is None:
        raise Refused(f"{call.name} over the samples of the batch")
    return found


@rule("amax", "amin", "logsumexp", "prod", "any", "all", "argmax", "argmin", "nanmean", "median", "nanmedian", "mode",
      "aminmax", "linalg_vector_norm_")  # fmt: skip
def along(call: Call) -> Kind:
    """`(x, dim, keepdim)`."""
    return _over(call, call.given(1, "dim", call.kwargs.get("axis")), call.given(2, "keepdim", False))


@rule("max", "min")
def extreme(call: Call) -> Kind:
    """Of one tensor along a dimension, or of two entry by entry."""
    if isinstance(call.given(1, "other"), Value):
        return aligned(call, call.tensors(), len(call.out().shape))
    return _over(call, call.given(1, "dim", call.kwargs.get("axis")), call.given(2, "keepdim", False))


@rule("norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "quantile", "nanquantile", "kthvalue",
      "renorm_")  # fmt: skip
def norm(call: Call) -> Kind:
    """`(x, p, dim, keepdim)`."""
    default = (-2, -1) if call.name == "linalg_matrix_norm" else None
    return _over(call, call.given(2, "dim", default), call.given(3, "keepdim", False))


@rule("var", "std", "var_mean", "std_mean")
def variance(call: Call) -> Kind:
    """`(x, dim, …, keepdim)`; a bool in the place of dim means all dimensions."""
    dims = call.given(1, "dim")
    dims = None if isinstance(dims, bool) else dims
    keepdim = call.kwargs.get("keepdim", call.args[3] if len(call.args) > 3 else False)
    return _over(call, dims, keepdim)
