"""Losses: with `reduction="none"` one entry per sample, with "sum" a partial sum, with "mean" a weighted partial.

The weight is the fraction of the samples, or of the targets that count.
"""

from __future__ import annotations

from typing import Any

from gemini.batch_analysis.assumptions import AllEntriesEqual
from gemini.batch_analysis.batch_kinds import Kind, Partial, Shard, WeightedPartial
from gemini.batch_analysis.microbatch_weights import TargetWeight, Weight
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, TensorValue
from gemini.batch_analysis.rules.pointwise import broadcast_kinds
from gemini.batch_analysis.rules.registry import rule

_LEGACY = {  # positions of size_average and reduce
    "cross_entropy": (3, 5), "nll_loss": (3, 5), "l1_loss": (2, 3), "mse_loss": (2, 3), "smooth_l1_loss": (2, 3),
    "binary_cross_entropy": (3, 4), "binary_cross_entropy_with_logits": (3, 4), "kl_div": (2, 3),
    "soft_margin_loss": (2, 3), "hinge_embedding_loss": (3, 4), "poisson_nll_loss": (4, 6),
    "multilabel_margin_loss": (2, 3), "multilabel_soft_margin_loss": (3, 4), "multi_margin_loss": (5, 6),
    "triplet_margin_loss": (7, 8), "cosine_embedding_loss": (4, 5), "margin_ranking_loss": (4, 5),
}  # fmt: skip


def _reduction(call: OpCall) -> str:
    if legacy := _legacy(call):
        return legacy
    words = [part for part in call.args if isinstance(part, str)]
    found = call.kwargs.get("reduction", words[0] if words else "mean")
    if found not in ("none", "mean", "sum", "batchmean"):
        raise AnalysisRefused(f"{call.name} with reduction {found!r}")
    return str(found)


def _legacy(call: OpCall) -> str:
    """Return the reduction that `size_average` and `reduce` request; '' where they are absent."""
    at, reduces = _LEGACY.get(call.name, (len(call.args), len(call.args)))
    mean, reduced = call.argument(at, "size_average"), call.argument(reduces, "reduce")
    if mean is None and reduced is None:
        return ""
    if not all(one is None or isinstance(one, (bool, int)) for one in (mean, reduced)):
        raise AnalysisRefused(f"{call.name} with size_average or reduce that are no truth values")
    if reduced is not None and not reduced:
        return "none"
    return "mean" if mean is None or mean else "sum"


def _reduce(kind: Kind, how: str, share: Weight | None = None) -> Kind:
    if how == "none":
        return kind
    return Partial() if how == "sum" else WeightedPartial(Weight() if share is None else share)


# ── classes ────────────────────────────────────────────────────────────────────────────────────────────────────
@rule("cross_entropy", "nll_loss")
def classes(call: OpCall) -> Kind:
    """Scores (samples, classes, …) and targets (samples, …): numbers of classes, or probabilities like the scores."""
    scores, target, weight = call.argument(0, "input"), call.argument(1, "target"), call.argument(2, "weight")
    if isinstance(weight, TensorValue) and not weight.is_constant:
        raise AnalysisRefused(f"{call.name} with weights of classes that depend on the batch")
    how = _reduction(call)
    kind = call.sample(scores if not scores.is_constant else target)
    if scores.is_constant and target.rank == scores.rank - 1 and kind.dim >= 1:
        kind = Shard(kind.dim + 1, kind.factor, kind.outer)
    call.must_be(scores, kind)
    if scores.rank < 2 or kind.dim == 1:
        raise AnalysisRefused(f"{call.name} whose classes are the samples")
    entry = Shard(kind.dim - (kind.dim > 1), kind.factor, kind.outer)  # without the dimension of classes
    if target.dtype.is_floating_point:
        call.must_be(target, kind)
        return _reduce(entry, how)
    call.must_be(target, entry)
    if how != "mean":
        return _reduce(entry, how)
    if not target.known or (isinstance(weight, TensorValue) and not weight.known):
        raise AnalysisRefused(f"the mean of {call.name} over targets that are not known before the step")
    ignore = call.argument(4, "ignore_index", -100)
    call.constant(ignore)
    if not isinstance(weight, TensorValue):
        return WeightedPartial(TargetWeight(target.key, entry, ignore))
    smoothed = bool(call.argument(7, "label_smoothing", 0.0)) and call.name == "cross_entropy"
    return WeightedPartial(TargetWeight(target.key, entry, ignore, weight.key, smoothed))


# ── entry by entry ─────────────────────────────────────────────────────────────────────────────────────────────
def _pairs(call: OpCall, names: tuple[str, ...], how: str, weight: Any = None) -> Kind:
    values = [call.argument(at, name) for at, name in enumerate(names)]
    values = [value for value in (*values, weight) if isinstance(value, TensorValue)]
    kind = broadcast_kinds(call, values, max(value.rank for value in values))
    return _reduce(kind, how)


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
def differences(call: OpCall) -> Kind:
    """`(input, target)`; a mean by weights is not one over samples."""
    if isinstance(call.kwargs.get("weight"), TensorValue):
        raise AnalysisRefused(f"{call.name} with weights")
    return _pairs(call, ("input", "target"), _reduction(call))


@rule("binary_cross_entropy", "binary_cross_entropy_with_logits")
def binary(call: OpCall) -> Kind:
    """`(input, target, weight, …, pos_weight)`; the mean counts entries, not weights."""
    logits = call.name.endswith("logits")
    weights = [call.argument(2, "weight"), call.argument(6, "pos_weight") if logits else None]
    given = [value for value in weights if isinstance(value, TensorValue)]
    kind = broadcast_kinds(
        call, [call.argument(0, "input"), call.argument(1, "target"), *given], call.argument(0, "input").rank
    )
    return _reduce(kind, _reduction(call))


@rule("soft_margin_loss", "hinge_embedding_loss", "poisson_nll_loss", "gaussian_nll_loss")
def pointwise_losses(call: OpCall) -> Kind:
    """Entry by entry, with settings that are numbers."""
    variance = call.argument(2, "var")
    if isinstance(variance, TensorValue) and variance.rank != call.argument(0, "input").rank:
        raise AnalysisRefused(f"{call.name} with one variance for a row of entries")
    return _pairs(call, ("input", "target", "var"), _reduction(call))


@rule("kl_div")
def kl_div(call: OpCall) -> Kind:
    """`batchmean` divides by the first size."""
    how = _reduction(call)
    kind = _pairs(call, ("input", "target"), "none")
    if how == "batchmean":
        return WeightedPartial(Weight()) if isinstance(kind, Shard) and kind.dim == 0 else Partial()
    return _reduce(kind, how)


# ── row by row ─────────────────────────────────────────────────────────────────────────────────────────────────
@rule("multilabel_margin_loss", "multilabel_soft_margin_loss", "multi_margin_loss")
def rows(call: OpCall) -> Kind:
    """Handle scores (samples, classes) and one target per sample."""
    scores, target = call.argument(0, "input"), call.argument(1, "target")
    for weight in (call.kwargs.get("weight"), *call.args[2:]):
        call.constant(weight)
    kind = call.sample(scores)
    if scores.rank != 2 or kind.dim != 0:
        raise AnalysisRefused(f"{call.name} whose first dimension is not the samples")
    call.must_be(target, kind)
    return _reduce(kind, _reduction(call))


@rule("triplet_margin_loss", "cosine_embedding_loss", "margin_ranking_loss")
def several(call: OpCall) -> Kind:
    """Several tensors, row by row or entry by entry."""
    values = call.tensors()
    kind = call.sample(next(value for value in values if not value.is_constant))
    flat = call.name == "margin_ranking_loss"
    if kind.dim != 0 or (not flat and values[0].rank != 2):
        raise AnalysisRefused(f"{call.name} whose first dimension is not the samples")
    for value in values:
        if value.rank == 0 or value.shape[0] == 1:
            raise AnalysisRefused(f"{call.name} with broadcasting")
        call.must_be(value, kind)
    return _reduce(kind, _reduction(call))


@rule("ctc_loss")
def ctc_loss(call: OpCall) -> Kind:
    """Scores (time, samples, classes), lengths, and targets (samples, length), or all targets in one row."""
    scores, targets = call.argument(0, "log_probs"), call.argument(1, "targets")
    lengths = [call.argument(2, "input_lengths"), call.argument(3, "target_lengths")]
    if scores.rank != 3 or not all(isinstance(one, TensorValue) for one in lengths):
        raise AnalysisRefused("ctc_loss of scores without samples, or of lengths that are plain numbers")
    call.must_be(scores, Shard(1))
    for one in lengths:
        call.must_be(one, Shard(0))
    if targets.rank == 2:
        call.must_be(targets, Shard(0))
    else:
        _in_one_row(call, targets, lengths[1])
    return _reduce(Shard(0), _reduction(call))


def _in_one_row(call: OpCall, targets: TensorValue, lengths: TensorValue) -> None:
    """Require that each sample's targets have as many entries as its part of the concatenated targets."""
    kind = call.sample(targets)
    if kind.dim or kind.outer != 1 or not lengths.known:
        raise AnalysisRefused("ctc_loss of targets in one row, of which it is not known where a sample begins")
    call.conditions.append(AllEntriesEqual(lengths.key, kind.factor))
