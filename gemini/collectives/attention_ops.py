"""Attention ops: multi-head attention where the shards hold slices of the heads.

Every shard projects to its own heads, attends with them, and projects back: a part of the result, which is a sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F


def divided_multi_head_attention(  # noqa: PLR0917 - the signature of `multi_head_attention_forward`
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: torch.Tensor,
    in_proj_bias: torch.Tensor | None,
    bias_k: None = None,  # noqa: ARG001 - the rule admits no other
    bias_v: None = None,  # noqa: ARG001
    add_zero_attn: bool = False,  # noqa: ARG001
    dropout_p: float = 0.0,
    out_proj_weight: torch.Tensor | None = None,
    out_proj_bias: torch.Tensor | None = None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,  # noqa: ARG001 - the rule admits no weights
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return the part of the result (length, samples, width) that comes from the heads of this shard."""
    assert out_proj_weight is not None
    length, samples, _ = query.shape
    size = embed_dim_to_check // num_heads
    heads = in_proj_weight.shape[0] // (3 * size)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (heads, size)).permute(1, 2, 0, 3)
        for x, weight, bias in zip((query, key, value), in_proj_weight.chunk(3), biases, strict=True)
    )
    mask, is_causal = _join_masks(q, attn_mask, key_padding_mask, is_causal)
    mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout_p if training else 0.0, is_causal)
    joined = mixed.permute(2, 0, 1, 3).reshape(length, samples, heads * size)
    return F.linear(joined, out_proj_weight, out_proj_bias), None


def _join_masks(
    query: torch.Tensor, mask: torch.Tensor | None, padding: torch.Tensor | None, is_causal: bool
) -> tuple[torch.Tensor | None, bool]:
    """Return what is added to the scores, and whether it is the causal mask alone."""
    if is_causal and mask is not None and padding is None:
        return None, True
    found: torch.Tensor | None = None
    for one in (mask, None if padding is None else padding[:, None, None, :]):
        if one is None:
            continue
        if one.dtype == torch.bool:
            one = torch.zeros_like(one, dtype=query.dtype).masked_fill_(one, -math.inf)
        found = one if found is None else found + one
    return found, False
