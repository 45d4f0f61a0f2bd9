"""Attention by heads, and by grouped heads: queries have a multiple of the heads of keys and values.

queries (b, 8, s, d)  keys, values (b, 2, s, d)  two units: 4 query heads and 1 head of keys and values each
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.batch_analysis.batch_kinds import Kind, Partial, Replicate, Shard
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, TensorValue
from gemini.tensor_parallel.rules.registry import batch_rule, shard_rule
from gemini.tensor_parallel.shard_plan import DIVIDED_HEADS
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


@shard_rule("multi_head_attention_forward")
def multi_head_attention(call: ShardQuery) -> Sequence[Kind]:
    """`nn.MultiheadAttention` by heads: rows of the three input projections, columns of the output projection."""
    weight, back = call.argument(5, "in_proj_weight"), call.argument(11, "out_proj_weight")
    if not isinstance(weight, TensorValue) or not isinstance(weight.kind, Shard):
        return batch_rule("multi_head_attention_forward")(call)  # type: ignore[return-value]
    width, heads = call.argument(3, "embed_dim_to_check"), call.argument(4, "num_heads")
    bias, out_bias = call.argument(6, "in_proj_bias"), call.argument(12, "out_proj_bias")
    query, masks = call.first, [call.argument(at, name) for at, name in ((14, "key_padding_mask"), (16, "attn_mask"))]
    rows = Shard(0, width // call.samples, 3)
    if heads % call.samples or weight.kind != rows or weight.shape[0] != 3 * width:
        raise AnalysisRefused("attention of heads that do not divide")
    if query.rank != 3 or call.argument(15, "need_weights", True) or call.argument(9, "add_zero_attn", False):
        raise AnalysisRefused("attention that returns its weights, or without a batch dimension")
    extra = [call.argument(at, name) for at, name in ((7, "bias_k"), (8, "bias_v"), (21, "static_k"), (22, "static_v"))]
    if any(one is not None for one in extra) or (isinstance(masks[1], TensorValue) and masks[1].rank != 2):
        raise AnalysisRefused("attention with biases of keys, or a mask per head")
    for one in (*(call.argument(at, name) for at, name in enumerate(("query", "key", "value"))), *masks):
        call.constant(one)
    call.must_be(back, Shard(1, width // call.samples))
    if bias is not None:
        call.must_be(bias, rows)
    if out_bias is not None and out_bias.kind != Partial():
        raise AnalysisRefused("attention whose result is a sum, with a bias that is not part of it")
    call.local, call.mask = DIVIDED_HEADS, Shard(1, heads // call.samples)
    return [Partial()]
