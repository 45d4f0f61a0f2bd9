"""Tiny configurations: any transformers configuration made small, without knowing the architecture.

Every field is shrunk by what its name says (a width, a number of layers, a vocabulary …), in sub-configurations
too. Fields of one kind get one value, so that what had to match still matches. Where an architecture needs
another relation, further recipes are tried: other values, unset fields filled in, or all widths divided by one
number, which keeps whatever relations the widths have.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from conformance.zoo.recipes import Recipe

_RULES: tuple[tuple[str, str], ...] = (
    (r"(^|_)(vocab_size|vocabulary_size|n_tokens|codebook_size|num_embeddings|type_vocab_size_keep)$", "vocabulary"),
    (r"shared_layers$", "one"),
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
    (r"(num_experts_per_tok|top_k|moe_k|num_experts_per_token|moe_topk|top_k_experts)$", "active"),
    (r"^(num_queries|num_proposals|num_object_queries|num_denoising|num_points_keep)$", "queries"),
    (r"^(n_group|num_expert_groups?|n_expert_groups|topk_group|num_group|num_experts_groups?)$", "one"),
    (r"^(image_size|img_size|pretrain_image_size|input_image_size)$", "image"),
    (r"^patch_size$", "patch"),
)
# Unset fields that architectures expect, by name; the kinds of the rules above are filled too.
_FILLED: tuple[tuple[str, Any], ...] = (
    (r"^(image|video|audio)_token_(id|index)$", 5),
    (r"pad_token_id$", 0),
    (r"(bos|decoder_start)_token_id$", 1),
    (r"eos_token_id$", 2),
    (r"^prediction_length$", 8),
    (r"^attn_layer_indices$", (1,)),
    (r"^layer_types$", ("full_attention",) * 8),
    (r"^mlp_layer_types$", ("dense", "sparse") * 4),
    (r"^vocabulary_map$", {"<image>": 4}),
    (r"^clip_qkv$", 8.0),
    (r"^default_language$", "en_XX"),
    (r"shared_experts$", 1),
    (r"^(initializer_range|.*dropout.*)$", 0.02),
)
_FILLABLE = ("vocabulary", "key_heads", "head", "width", "feedforward", "heads", "experts", "active")
_TOKEN = re.compile(r"(token_id|token_index|_id)$")
_NO_WIDTH = re.compile(r"(theta|window|rate|length|samples|_base|scal|position|patch|kernel|stride|period|frames)")
_SKIPPED = ("architectures", "torch_dtype", "dtype", "id2label", "label2id")
_COUNTED = ("layers", "vocabulary", "positions", "experts", "active", "queries", "one")


def shrink(config: Any, recipe: Recipe, seen: set[int] | None = None) -> Any:
    """Make a configuration small, in place."""
    seen = set() if seen is None else seen
    if id(config) in seen:
        return config
    seen.add(id(config))
    layers = vars(config).get("num_hidden_layers")
    for name, value in list(vars(config).items()):
        if name.startswith("_") or name in _SKIPPED:
            continue
        if is_config(value):
            shrink(value, recipe, seen)
            continue
        small = _filled(name, recipe) if value is None and recipe.fill else _shrunk(name, value, recipe)
        if isinstance(value, list) and len(value) == layers and layers > 4:
            small = _covering(small, recipe.layers)  # an entry a layer
        if small != value:
            try:
                setattr(config, name, small)
            except (AttributeError, NotImplementedError, ValueError, TypeError):
                continue
    _fit_stages(config, layers)
    _fit_grid(config)
    return config


def rebuilt(config: Any) -> Any:
    """The configuration made anew by its constructor from its own fields."""
    accepted = inspect.signature(type(config)).parameters
    return type(config)(**{name: value for name, value in vars(config).items() if name in accepted})


def expected(name: str, recipe: Recipe) -> Any:
    """A value for a field that an architecture reads and its configuration does not have."""
    kind = _kind(name)
    if kind is not None:
        return _value(kind, recipe)
    if name.endswith("rope_theta"):
        return 10_000.0
    if "dropout" in name:
        return 0.1
    return 3 if _TOKEN.search(name) else None


def is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "model_type")


def _kind(name: str) -> str | None:
    return next((kind for pattern, kind in _RULES if re.search(pattern, name)), None)


def _value(kind: str, recipe: Recipe) -> int:
    fixed = {"positions": 128, "experts": 4, "active": 2, "queries": 8, "one": 1}
    return fixed[kind] if kind in fixed else int(getattr(recipe, kind))


def _filled(name: str, recipe: Recipe) -> Any:
    for pattern, value in _FILLED:
        if re.search(pattern, name):
            return list(value) if isinstance(value, tuple) else value
    kind = _kind(name)
    if recipe.divide or recipe.gentle:  # widths are of the architecture's own, so only numbers of things can be filled
        return _value(kind, recipe) if kind in ("vocabulary", "experts", "active") else None
    return _value(kind, recipe) if kind in _FILLABLE else None


def _shrunk(name: str, value: Any, recipe: Recipe) -> Any:
    if isinstance(value, (list, tuple)) and name.endswith(("layer_types", "block_type", "layers_block_type")):
        return type(value)(_covering(list(value), recipe.layers))
    if isinstance(value, float) and name.endswith("depth_coefficient"):
        return min(value, 0.5)
    if isinstance(value, bool) or value is None or isinstance(value, (str, float)):
        return value
    if isinstance(value, int):
        return _shrunk_int(name, value, recipe)
    if isinstance(value, (list, tuple)) and value and all(type(part) is int for part in value):
        return type(value)(_shrunk_list(name, list(value), recipe))
    if isinstance(value, dict):
        return _shrunk_dict(value, recipe)
    if isinstance(value, list) and re.search(r"feat(ure)?_sizes$", name):  # maps of pictures of 1024 dots a side
        return [[max(1, side * recipe.image // 1024) for side in part] for part in value]
    return value


def _shrunk_int(name: str, value: int, recipe: Recipe) -> int:
    if _TOKEN.search(name):
        return value if 0 <= value < recipe.vocabulary else value % recipe.vocabulary if value >= 0 else value
    if re.search(r"_period$", name):
        return min(value, 2)
    if re.search(r"_offset$", name):
        return min(value, 1)
    kind = _kind(name)
    if recipe.divide and (kind not in (*_COUNTED, "image")):
        keep = kind in ("heads", "key_heads", "patch") or value < 32 or _NO_WIDTH.search(name)
        return value if keep else max(4, value // recipe.divide)
    if kind is not None:
        if recipe.gentle and kind not in (*_COUNTED, "image"):
            return value
        small = _value(kind, recipe)
        if (kind in _COUNTED and kind != "vocabulary") or recipe.gentle:
            return min(value, small)
        return small if value > 0 else value
    if value >= 256 and not recipe.gentle and not _NO_WIDTH.search(name):
        return recipe.width * (value // 256) if value < 512 else recipe.feedforward
    return value


def _shrunk_list(name: str, values: list[int], recipe: Recipe) -> list[int]:
    if _kind(name) == "image":
        return [recipe.image] * len(values)
    if re.search(r"(depth|layers|blocks|repeats)", name):
        return [min(value, recipe.depth) for value in values] if "ind" not in name else values
    if recipe.gentle:
        return values
    if name == "mrope_section":
        return _sections(values, recipe)
    if re.search(r"(size|dim|channel|width|embed)", name) and max(values) >= 32 and "kernel" not in name:
        if recipe.divide:
            return [value if value <= 4 or "image" in name else max(2, value // recipe.divide) for value in values]
        if not recipe.widen_lists:
            return [recipe.width] * len(values)
        smallest = min(value for value in values if value > 0)
        return [max(1, value * recipe.width // smallest // 2) if value > 4 else value for value in values]
    if re.search(r"(heads|num_attention)", name) and not recipe.divide:
        return [min(value, recipe.heads) for value in values]
    return values


def _shrunk_dict(value: dict[Any, Any], recipe: Recipe) -> dict[Any, Any]:
    """Settings of rotary embeddings and the like: numbers and lists in them by their names."""
    made = {
        key: part if isinstance(part, (bool, str, float)) or not isinstance(key, str) else _shrunk(key, part, recipe)
        for key, part in value.items()
    }
    if recipe.fill and "rope_theta" in made and "mrope_section" not in made and not (recipe.divide or recipe.gentle):
        turning = int(recipe.head * made.get("partial_rotary_factor", 1)) // 2
        made["mrope_section"] = [turning - 2 * (turning // 3), turning // 3, turning // 3]
    return made


def _sections(values: list[int], recipe: Recipe) -> list[int]:
    """Parts of a head that turn by time, row and column: together half a head."""
    if recipe.divide:
        return [max(1, value // recipe.divide) for value in values]
    each = recipe.head // 2 // len(values)
    return [recipe.head // 2 - (len(values) - 1) * each, *[each] * (len(values) - 1)]


def _covering(kinds: list[Any], count: int) -> list[Any]:
    """The first layers of a list, with every kind of layer among them."""
    chosen, different = kinds[:count], []
    for kind in kinds:
        if kind not in different:
            different.append(kind)
    for kind in different:
        if kind not in chosen and chosen:
            chosen[-1 - different.index(kind) % len(chosen)] = kind
    return chosen


def _fit_grid(config: Any) -> None:
    """Where a configuration says how many patches a side of a picture has, it is as many as there are now."""
    sizes = [getattr(config, name, None) for name in ("image_size", "patch_size", "image_embedding_size")]
    if all(isinstance(size, int) for size in sizes):
        config.image_embedding_size = sizes[0] // sizes[1]


def _fit_stages(config: Any, before: int | None) -> None:
    """A backbone that gives maps of some of its layers gives those of the last of the layers that are left."""
    names, after = getattr(config, "stage_names", None), getattr(config, "num_hidden_layers", None)
    if not names or not isinstance(after, int) or before != len(names) - 1 or after >= before:
        return
    count = min(after, len(getattr(config, "_out_indices", None) or [1]))
    config.stage_names = names[: after + 1]
    config._out_indices = list(range(after + 1 - count, after + 1))
    config._out_features = config.stage_names[-count:]
