"""Linear ops: the ops that sums and means over the batch may pass before the loss.

a + b       sums stay a sum, means by the same share stay a mean; else means become sums first
mean + c    still a mean: the shares add up to one
sum + c     c would count M times: the sum is made a mean of micro-batches first
sum / c, sum * c, -sum, sum.to(float) …
sum / count of samples      a mean; count · mean is a sum again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemini.batch_analysis.batch_kinds import Kind, Partial, Replicate, WeightedPartial
from gemini.batch_analysis.microbatch_weights import Weight
from gemini.batch_analysis.op_call import (
    AnalysisRefused,
    DataNumber,
    DecisionDemand,
    OpCall,
    SampleCount,
    TensorValue,
    UnknownNumber,
)
from gemini.batch_analysis.rules.pointwise import broadcast_kinds
from gemini.batch_analysis.rules.registry import rule


def add_kinds(call: OpCall, parts: Sequence[Any]) -> Kind:
    """Return the kind of a sum, or a stack, of tensors and numbers of which at least one is a sum over the batch."""
    values = [part for part in parts if isinstance(part, TensorValue)]
    if any(isinstance(part, (SampleCount, UnknownNumber)) for part in parts):
        raise AnalysisRefused(f"{call.name} of a sum over the batch and a number of samples")
    for value in values:
        if not value.is_constant and not value.is_sum:
            raise AnalysisRefused(f"{call.name} of samples and a sum or mean over the batch")
    constant = any(value.is_constant for value in values) or any(
        isinstance(part, DataNumber) or (isinstance(part, (int, float, complex)) and part != 0) for part in parts
    )
    means = [value for value in values if isinstance(value.kind, WeightedPartial)]
    sums = [value for value in values if isinstance(value.kind, Partial)]
    if means and not sums and len({value.kind for value in means}) == 1:
        return means[0].kind
    if means:
        raise DecisionDemand(means[0].key, "share")
    if constant:
        raise DecisionDemand(sums[0].key, "times")
    return Partial()


@rule("add", "sub", "rsub")
def add(call: OpCall) -> Kind:
    """Sums and differences."""
    if not any(value.is_sum for value in call.tensors()):
        return broadcast_kinds(call, call.tensors(), len(call.out().shape))
    call.constant(call.kwargs.get("alpha", 1))
    return add_kinds(call, call.args[:2] if len(call.args) > 1 else (*call.args, call.kwargs.get("other", 0)))


@rule("mul", counts=True)
def mul(call: OpCall) -> Kind:
    """Products: of a sum with a constant."""
    left, right = call.argument(0, "input"), call.argument(1, "other")
    if isinstance(left, (SampleCount, UnknownNumber)) or (
        isinstance(right, TensorValue) and right.is_sum and not _is_sum(left)
    ):
        left, right = right, left
    return _scale(call, left, right, inverse=False)


@rule("div", counts=True)
def div(call: OpCall) -> Kind:
    """Quotients: of a sum by a constant."""
    if call.kwargs.get("rounding_mode") is not None:
        call.constant([part for part in (*call.args, *call.kwargs.values()) if not isinstance(part, TensorValue)])
        return broadcast_kinds(call, call.tensors(), len(call.out().shape))
    return _scale(call, call.argument(0, "input"), call.argument(1, "other"), inverse=True)


def _is_sum(part: Any) -> bool:
    return isinstance(part, TensorValue) and part.is_sum


def _scale(call: OpCall, value: Any, by: Any, inverse: bool) -> Kind:
    if isinstance(by, UnknownNumber) or isinstance(value, (SampleCount, UnknownNumber)):
        raise AnalysisRefused(f"{call.name} with a number that depends on the number of samples")
    if isinstance(by, SampleCount):
        return _scale_by_count(call, value, inverse)
    if not _is_sum(value):
        return broadcast_kinds(call, call.tensors(), len(call.out().shape))
    if (
        isinstance(by, TensorValue)
        and isinstance(by.kind, Partial)
        and by.invariance is not None
        and inverse
        and call.traced
    ):
        return _scale_by_count(call, value, inverse)  # equal for every sample
    if isinstance(by, TensorValue) and not by.is_constant:
        raise AnalysisRefused(f"{call.name} of a sum over the batch and another")
    return value.kind  # type: ignore[no-any-return]


def _scale_by_count(call: OpCall, value: TensorValue, inverse: bool) -> Kind:
    if inverse and isinstance(value.kind, Partial):
        return WeightedPartial(Weight())
    if not inverse and value.kind == WeightedPartial(Weight()):
        return Partial()
    if value.is_constant and not inverse:
        return Partial()  # c · n: micro-batches add up
    raise AnalysisRefused(f"{call.name} with the number of samples")


@rule(
    "neg", "clone", "detach", "contiguous", "cpu", "cuda", "double", "float", "half", "bfloat16", "requires_grad",
    "alias", "view_as_real", "view_as_complex", "lift_fresh", "detach_copy", "get_data", "positive", "identity",
)  # fmt: skip
def unary(call: OpCall) -> Kind:
    """Pass every kind through; indices of samples are unchanged."""
    if call.name == "neg" and not call.first.is_sum:
        return call.sample(call.first)
    return call.first.kind


@rule("to", "type", "type_as", "_to_copy", "long", "int", "bool", "short", "char", "byte", "as_tensor")
def cast(call: OpCall) -> Kind:
    """Keep sums under a cast, unless it rounds them; a tensor used only for its type is ignored."""
    value, made = call.first, call.out().dtype
    rounds = value.dtype.is_floating_point and not made.is_floating_point
    if value.is_sum and (rounds or str(made) == "torch.bool"):
        raise AnalysisRefused(f"{call.name} rounds a sum over the batch")
    return value.kind if not value.is_constant else Replicate()
