"""Divided vocabularies: tables of embeddings by rows or columns, and the loss of logits whose classes are divided."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from gemini.batch_analysis.batch_kinds import Kind, Partial, Replicate, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, TensorValue
from gemini.batch_analysis.rules.shape_ops import move_shard
from gemini.tensor_parallel.layouts import ALL_REDUCE
from gemini.tensor_parallel.rules.registry import batch_rule, shard_rule
from gemini.tensor_parallel.shard_plan import VOCABULARY_CROSS_ENTROPY, VOCABULARY_EMBEDDING, InnerCollective
from gemini.tensor_parallel.shard_query import ShardQuery


@shard_rule("embedding")
def embedding(call: ShardQuery) -> Kind | Sequence[Kind]:
    """`(indices, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)`."""
    index, weight = call.argument(0, "input"), call.argument(1, "weight")
    if call.argument(3, "max_norm") is not None or call.argument(6, "sparse", False):
        raise AnalysisRefused("an embedding that renormalizes its table, or has sparse gradients")
    if isinstance(index.kind, Shard):
        if call.argument(5, "scale_grad_by_freq", False):
            raise AnalysisRefused("an embedding whose gradients depend on how often a row occurs")
        if not weight.is_constant:
            raise AnalysisRefused("an embedding with indices and table divided")
        return index.kind
    kind = call.sample(weight)
    if not index.is_constant or kind.outer != 1:
        raise AnalysisRefused("an embedding of a table in several groups")
    if kind.dim == 1:
        return move_shard(kind, len(call.out().shape) - 1)
    if call.argument(5, "scale_grad_by_freq", False):
        raise AnalysisRefused("an embedding whose gradients depend on how often a row occurs")
    call.local = VOCABULARY_EMBEDDING
    return Partial()


@shard_rule("cross_entropy")
def cross_entropy(call: ShardQuery) -> Kind | Sequence[Kind]:
    """`(scores, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)`."""
    scores, target, weight = call.argument(0, "input"), call.argument(1, "target"), call.argument(2, "weight")
    if not isinstance(scores.kind, Shard) or scores.kind.dim != min(1, scores.rank - 1):
        return batch_rule("cross_entropy")(call)
    plain = call.argument(3, "size_average") is None and call.argument(5, "reduce") is None
    if target.dtype.is_floating_point or not target.is_constant or not plain:
        raise AnalysisRefused("cross_entropy over classes, other than by numbers of classes")
    if scores.kind.outer != 1 or (isinstance(weight, TensorValue) and not weight.is_constant):
        raise AnalysisRefused("cross_entropy over classes with divided weights, or in several groups")
    call.local = VOCABULARY_CROSS_ENTROPY
    size = prod(target.shape) * max(scores.dtype.itemsize, 4)  # numbers are reduced in float32 at least
    passes = 2 if call.argument(7, "label_smoothing", 0.0) else 1
    call.collectives += [InnerCollective(ALL_REDUCE, size), InnerCollective(ALL_REDUCE, 2 * size)] * passes
    return Replicate()


@shard_rule("nll_loss")
def nll_loss(call: OpCall) -> Kind | Sequence[Kind]:
    """By rows only."""
    return batch_rule("nll_loss")(call)
