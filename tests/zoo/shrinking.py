"""Tiny configurations: any transformers configuration made small, without knowing the architecture.

Every field is shrunk by what its name says (a width, a number of layers, a vocabulary …), in sub-configurations
too. Fields of one kind get one value, so that what had to match still matches. Where an architecture needs
another relation, a second recipe with other values is tried.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """The values the kinds of fields get."""

    width: int = 32
    heads: int = 4
    key_heads: int = 2
    feedforward: int = 64
    layers: int = 4
    vocabulary: int = 128
    image: int = 32
    patch: int = 8
    widen_lists: bool = True
    gentle: bool = False  # only fewer layers and tokens: widths stay, for architectures with relations of their own
    rebuild: bool = False  # make the configuration anew from the small fields, so that derived ones follow

    @property
    def head(self) -> int:
        return self.width // self.heads


RECIPES = (
    Recipe(),
    Recipe(rebuild=True),
    Recipe(key_heads=4),
    Recipe(width=64, heads=4, key_heads=4, feedforward=64, image=64, patch=16),
    Recipe(width=64, heads=2, key_heads=2, feedforward=128, image=64, patch=8, widen_lists=False),
    Recipe(width=128, heads=4, key_heads=4, feedforward=128, layers=2, image=64, patch=8),
    Recipe(layers=2, gentle=True),
)

_RULES: tuple[tuple[str, str], ...] = (
    (r"(^|_)(vocab_size|vocabulary_size|n_tokens|codebook_size|num_embeddings|type_vocab_size_keep)$", "vocabulary"),
    (r"(num_hidden_layers|num_layers|n_layers?|num_.*_layers|.*_layers|num_blocks|n_blocks|depth)$", "layers"),
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads|num_.*key_value_heads|n_head_kv)$", "key_heads"),
    (r"(num_attention_heads|num_heads|n_heads?|.*_attention_heads|.*num_heads|encoder_heads|decoder_heads)$", "heads"),
    (r"(^|_)(head_dim|d_kv|head_size|attention_head_size|kv_channels|qk_head_dim|v_head_dim|d_head)$", "head"),
    (
        r"(intermediate_size|ffn_dim|d_ff|d_inner|n_inner|mlp_dim|feedforward.*|.*ffn.*dim|ffn_hidden_size|.*intermediate_.*size)$",
        "feedforward",
    ),
    (
        r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|projection_dim|emb_dim|dim|encoder_dim|"
        r"decoder_dim|model_dim|word_embed_proj_dim|.*_hidden_size|.*_embed_dim|.*hidden_dim|.*_dim_model|width|"
        r"text_embed_dim|out_hidden_size|conv_dim|num_filters|embedding_dim|hidden_channels|encoder_hidden_channels)$",
        "width",
    ),
    (
        r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_source_positions|max_target_positions|seq_length|max_length)$",
        "positions",
    ),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)$", "experts"),
    (r"(num_experts_per_tok|top_k|moe_k|num_experts_per_token|moe_topk)$", "active"),
    (r"^image_size$", "image"),
    (r"^patch_size$", "patch"),
)
_TOKEN = re.compile(r"(token_id|token_index|_id)$")


def _value(kind: str, recipe: Recipe) -> int:
    fixed = {"positions": 128, "experts": 4, "active": 2}
    return fixed[kind] if kind in fixed else int(getattr(recipe, kind))


def _shrunk(name: str, value: Any, recipe: Recipe) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, (str, float)):
        return value
    if isinstance(value, int):
        return _shrunk_int(name, value, recipe)
    if isinstance(value, (list, tuple)) and value and all(type(part) is int for part in value):
        return type(value)(_shrunk_list(name, list(value), recipe))
    return value


def _shrunk_int(name: str, value: int, recipe: Recipe) -> int:
    if _TOKEN.search(name):
        return value if 0 <= value < recipe.vocabulary else value % recipe.vocabulary if value >= 0 else value
    for pattern, kind in _RULES:
        if re.search(pattern, name):
            if recipe.gentle and kind not in ("layers", "vocabulary", "positions", "experts", "active"):
                return value
            small = _value(kind, recipe)
            return (
                min(value, small)
                if kind in ("layers", "experts", "active", "positions")
                else small
                if value > 0
                else value
            )
    if (
        value >= 256
        and not recipe.gentle
        and not re.search(r"(theta|window|rate|length|sample|_base|scal|position)", name)
    ):
        return recipe.width * (value // 256 if value < 512 else 2) if value < 512 else recipe.feedforward
    return value


def _shrunk_list(name: str, values: list[int], recipe: Recipe) -> list[int]:
    if "depth" in name or "layers" in name or "blocks" in name:
        return [min(value, 2) for value in values] if "index" not in name and "indices" not in name else values
    if recipe.gentle:
        return values
    if re.search(r"(heads|num_attention)", name):
        return [min(value, recipe.heads) for value in values]
    if re.search(r"(size|dim|channel|width|embed)", name) and max(values) >= 32 and "kernel" not in name:
        if not recipe.widen_lists:
            return [recipe.width] * len(values)
        smallest = min(value for value in values if value > 0)
        return [max(1, value * recipe.width // smallest // 2) if value > 4 else value for value in values]
    return values


def _covering(kinds: list[Any], count: int) -> list[Any]:
    """The first layers of a list, with every kind of layer among them."""
    chosen = kinds[:count]
    for kind in dict.fromkeys(kinds):
        if kind not in chosen and chosen:
            chosen[-1 - list(dict.fromkeys(kinds)).index(kind) % len(chosen)] = kind
    return chosen


def rebuilt(config: Any) -> Any:
    """The configuration made anew by its constructor from its own fields."""
    accepted = inspect.signature(type(config)).parameters
    return type(config)(**{name: value for name, value in vars(config).items() if name in accepted})


def shrink(config: Any, recipe: Recipe, seen: set[int] | None = None) -> Any:
    """Make a configuration small, in place."""
    seen = set() if seen is None else seen
    if id(config) in seen:
        return config
    seen.add(id(config))
    for name, value in list(vars(config).items()):
        if name.startswith("_") or name in ("architectures", "torch_dtype", "dtype", "id2label", "label2id"):
            continue
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value, recipe, seen)
            continue
        small = _shrunk(name, value, recipe)
        if isinstance(value, list) and name.endswith(("layer_types", "block_type")):
            small = _covering(value, recipe.layers)
        if isinstance(value, dict) and "mrope_section" in value:
            parts = len(value["mrope_section"])
            rest = recipe.head // 2 - (parts - 1) * (recipe.head // 2 // parts)
            small = {**value, "mrope_section": [rest, *[recipe.head // 2 // parts] * (parts - 1)]}
        if small != value:
            try:
                setattr(config, name, small)
            except (AttributeError, NotImplementedError, ValueError, TypeError):
                continue
    return config
