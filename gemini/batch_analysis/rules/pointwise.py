"""Pointwise ops: entry by entry, with broadcasting. A sample's entries depend on that sample's alone.

x (n, 12, 64)  +  position (12, 64)      samples stay in dimension 0
x (n, 1, 64)   -  x (1, n, 64)           refused: all pairs of samples
"""

from __future__ import annotations

from collections.abc import Iterable

from gemini.batch_analysis.batch_kinds import Kind, Replicate, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, TensorValue
from gemini.batch_analysis.rules.masked_rows import places
from gemini.batch_analysis.rules.registry import rule

NAMES = """
abs acos acosh asin asinh atan atanh arccos arcsin arctan atan2 arctan2 cos cosh sin sinh sinc tan tanh
exp exp2 expm1 log log10 log1p log2 logaddexp logaddexp2 logit xlogy xlog1py sqrt rsqrt square pow float_power
reciprocal sign sgn signbit ceil floor round trunc fix frac fmod remainder floor_divide rfloor_divide div_ rdiv
erf erfc erfinv lgamma digamma mvlgamma polygamma i0 i0e i1 i1e entr ndtr ndtri log_ndtr gammaln zeta
clamp clamp_min clamp_max nan_to_num copysign nextafter hypot ldexp lerp maximum minimum fmax fmin
addcmul addcdiv masked_fill eq ne lt le gt ge isnan isinf isfinite isposinf isneginf isclose
logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift
bitwise_right_shift lshift rshift angle conj conj_physical resolve_conj resolve_neg polar complex real imag heaviside
relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh softplus softsign tanhshrink
hardshrink softshrink logsigmoid log_sigmoid sigmoid threshold rrelu rectify dropout feature_dropout alpha_dropout
full_like empty_like rand_like randn_like randint_like bernoulli normal uniform exponential log_normal
cauchy geometric zero fill copy isreal deg2rad rad2deg gcd lcm
get_real get_imag fake_quantize_per_tensor_affine special_expit expit erfcx
"""


def broadcast_kinds(call: OpCall, values: Iterable[TensorValue], rank: int) -> Kind:
    """Return the kind of a broadcast of tensors to `rank` dimensions."""
    values = list(values)
    found: Shard | None = None
    for value in values:
        if value.is_constant:
            continue
        kind = call.sample(value)
        placed = Shard(kind.dim + rank - value.rank, kind.factor, kind.outer)
        if found is not None and placed != found:
            raise AnalysisRefused(f"{call.name} of samples in dimension {found.dim} and in dimension {placed.dim}")
        found = placed
    if found is None:
        return Replicate()
    for value in values:
        at = found.dim - (rank - value.rank)
        if value.is_constant and at >= 0 and value.shape[at] != 1:
            call.must_be(value, Shard(at, found.factor, found.outer))
    return found


@rule(*NAMES.split())
def pointwise(call: OpCall) -> Kind:
    """Entry by entry."""
    return broadcast_kinds(call, call.tensors(), len(call.out().shape))


@rule("zeros_like", "ones_like")
def fill_like(call: OpCall) -> Kind:
    """Handle ops with equal entries everywhere: of a sum over the batch, a constant."""
    return Replicate() if call.first.is_sum else call.sample(call.first)


@rule("where")
def where(call: OpCall) -> Kind | list[Kind]:
    """A choice entry by entry; with a condition alone, its places."""
    if len(call.args) + len(call.kwargs) < 3:
        return places(call)
    return pointwise(call)  # type: ignore[return-value]


@rule("nonzero")
def nonzero(call: OpCall) -> list[Kind]:
    """The places of a mask."""
    if call.argument(1, "as_tuple", False) is not True:
        raise AnalysisRefused("nonzero(): how many places there are depends on contents")
    return places(call)


@rule("bucketize")
def bucketize(call: OpCall) -> Kind:
    """Entry by entry, by boundaries that are the same for all."""
    call.only(call.first)
    return call.sample(call.first)


@rule("dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")
def channels(call: OpCall) -> Kind:
    """Drops whole channels of the second dimension: samples must be the first."""
    kind = call.sample(call.first)
    if kind.dim != 0 or kind.entries != 1:
        raise AnalysisRefused(f"{call.name} of samples that are not in the first dimension")
    return kind


@rule("prelu")
def prelu(call: OpCall) -> Kind:
    """Handle one weight per channel; channels are the second dimension."""
    kind = call.sample(call.first)
    call.only(call.first)
    weight = call.argument(1, "weight")
    if kind.dim == 1 and isinstance(weight, TensorValue) and weight.shape not in ((), (1,)):
        raise AnalysisRefused("prelu whose channels are the samples")
    return kind
