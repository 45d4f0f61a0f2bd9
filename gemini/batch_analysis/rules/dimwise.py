"""Shape-preserving ops along named dimensions: softmax, cumulative sums, sorting, Fourier transforms, matrices."""

from __future__ import annotations

from typing import Any

from gemini.batch_analysis.batch_kinds import Kind, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, axes
from gemini.batch_analysis.rules.registry import rule


def _apart(call: OpCall, dims: Any) -> Shard:
    value = call.first
    call.only(value)
    call.constant(dims)
    kind = call.sample(value)
    if kind.dim in axes(dims, value.rank):
        raise AnalysisRefused(f"{call.name} over the samples of the batch")
    return kind


@rule("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "glu")
def one_dimension(call: OpCall) -> Kind:
    """`(x, dim)`; if older code omits the dimension, the rank determines it."""
    dim = call.argument(1, "dim", -1 if call.name == "glu" else None)
    if dim is None:
        dim = 0 if call.first.rank in (0, 1, 3) else 1
    return _apart(call, dim)


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(call: OpCall) -> Kind:
    """`(gradient, result, dim, dtype)`, called by custom functions in their backward."""
    from gemini.batch_analysis.rules.pointwise import broadcast_kinds

    one, two, dim = call.args[0], call.args[1], call.args[2]
    call.only(one, two)
    kind = broadcast_kinds(call, [one, two], one.rank) if one.shape == two.shape else None
    if not isinstance(kind, Shard) or kind.dim in axes(dim, one.rank):
        raise AnalysisRefused(f"{call.name} over the samples of the batch")
    return kind


@rule("gumbel_softmax")
def gumbel_softmax(call: OpCall) -> Kind:
    """`(logits, tau, hard, eps, dim)`."""
    return _apart(call, call.argument(4, "dim", -1))


@rule("sort", "argsort", "msort")
def sort(call: OpCall) -> Kind:
    """`(x, dim)`, or with `stable` first by name."""
    dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 and not isinstance(call.args[1], bool) else -1)
    return _apart(call, 0 if call.name == "msort" else dim)


@rule("topk")
def topk(call: OpCall) -> Kind:
    """`(x, k, dim)`."""
    call.constant(call.argument(1, "k"))
    return _apart(call, call.argument(2, "dim", -1))


@rule("diff")
def diff(call: OpCall) -> Kind:
    """`(x, n, dim)`."""
    return _apart(call, call.argument(2, "dim", -1))


@rule("normalize")
def normalize(call: OpCall) -> Kind:
    """`(x, p, dim)`."""
    return _apart(call, call.argument(2, "dim", 1))


@rule("cosine_similarity", "pairwise_distance")
def similarity(call: OpCall) -> Kind:
    """Two tensors along a dimension that is removed."""
    from gemini.batch_analysis.rules.pointwise import broadcast_kinds
    from gemini.batch_analysis.rules.reductions import shard_after_reduction

    one, two = call.argument(0, "x1"), call.argument(1, "x2")
    call.only(one, two)
    rank = max(one.rank, two.rank)
    dim = call.argument(2, "dim", 1) if call.name == "cosine_similarity" else -1
    keepdim = call.name == "pairwise_distance" and bool(call.argument(4, "keepdim", False))
    kind = broadcast_kinds(call, [one, two], rank)
    found = shard_after_reduction(kind, axes(dim, rank), keepdim) if isinstance(kind, Shard) else None
    if found is None:
        raise AnalysisRefused(f"{call.name} over the samples of the batch")
    return found


@rule("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft")
def fourier(call: OpCall) -> Kind:
    """`(x, n, dim)`."""
    call.constant(call.argument(1, "n"))
    return _apart(call, call.argument(2, "dim", -1))


@rule("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn")
def fourier_many(call: OpCall) -> Kind:
    """`(x, s, dim)`."""
    return _apart(call, call.argument(2, "dim", (-2, -1) if call.name.endswith("2") else None))


@rule("fft_fftshift", "fft_ifftshift")
def shift(call: OpCall) -> Kind:
    """`(x, dim)`."""
    return _apart(call, call.argument(1, "dim"))


@rule("matrix_exp", "linalg_inv", "inverse", "linalg_det", "linalg_slogdet", "det", "linalg_cholesky", "cholesky",
      "linalg_qr", "linalg_svd", "linalg_eigh", "logdet", "pinverse", "linalg_pinv", "matrix_power",
      "linalg_matrix_power")  # fmt: skip
def matrices(call: OpCall) -> Kind:
    """Of the last two dimensions."""
    return _apart(call, (-2, -1))
