"""Attention by heads, and by grouped heads: queries have a multiple of the heads of keys and values.

queries (b, 8, s, d)  keys, values (b, 2, s, d)  two units: 4 query heads and 1 head of keys and values each
"""

from __future__ import annotations

from gemini.batch_analysis.batch_kinds import Kind, Replicate, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, TensorValue
from gemini.tensor_parallel.rules.registry import batch_rule, shard_rule
from gemini.tensor_parallel.shard_query import ShardQuery


@shard_rule("scaled_dot_product_attention")
def attention(call: ShardQuery) -> Kind:
    """`(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)`."""
    query, key, value = (call.argument(at, name) for at, name in enumerate(("query", "key", "value")))
    if query.is_constant and key.is_constant and value.is_constant:
        raise AnalysisRefused("attention with only its mask divided")
    if call.argument(7, "enable_gqa", False) is True and query.shape[-3] != key.shape[-3]:
        kind = _grouped(call, query, key, value)
    else:
        kind = batch_rule("scaled_dot_product_attention")(call)  # type: ignore[assignment]
    if call.random and isinstance(kind, Shard):
        call.mask = kind  # of the scores, whose leading dimensions are those of the result
    return kind


def _grouped(call: OpCall, query: TensorValue, key: TensorValue, value: TensorValue) -> Kind:
    kind, mask = call.sample(query), call.argument(3, "attn_mask")
    dim = query.rank - 3
    if kind.dim != dim or kind.outer != 1 or key.kind != value.kind or not isinstance(key.kind, Shard):
        raise AnalysisRefused("attention of grouped heads that are not divided by heads")
    if key.kind.dim != dim or key.kind.outer != 1 or kind.factor * key.shape[dim] != key.kind.factor * query.shape[dim]:
        raise AnalysisRefused("attention whose heads of queries and keys are not divided alike")
    if isinstance(mask, TensorValue):
        at = dim - (query.rank - mask.rank)
        per_head = at >= 0 and mask.shape[at] != 1
        if mask.kind != (Shard(at, kind.factor) if per_head else Replicate()):
            raise AnalysisRefused("attention whose mask is not divided as its heads are")
    return kind
