"""Random ops: the ops and functions of torch that use the generator; whole-batch random numbers and their slices.

Most random ops fill a tensor whose contents do not matter (`bernoulli_(0.9)` in a dropout). They run on a tensor of the
whole batch, in the same memory order, and a micro-batch receives its slice. Ops that depend on contents (`multinomial`,
`bernoulli` of probabilities) cannot run before all micro-batches are available: they are refused.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

# In place: the tensor is overwritten; the other arguments are numbers.
IN_PLACE = {
    aten.bernoulli_.float,
    aten.uniform_.default,
    aten.normal_.default,
    aten.exponential_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.geometric_.default,
}
# Shaped like another tensor, whose contents do not matter.
LIKE = {
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.bernoulli.p,
}
# New tensors: the position of the size among the arguments.
NEW = {
    aten.rand.default: 0,
    aten.randn.default: 0,
    aten.randint.default: 1,
    aten.randint.low: 2,
    aten.normal.float_float: 2,
}
DROPOUT = {aten.native_dropout.default}

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
# Python functions of torch with random ops; `is_random_op` covers ops in C++.
_PYTHON_FUNCTIONS = frozenset((
    *_DROPOUTS, "gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d",
    "fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices", "multi_head_attention_forward",
    "scaled_dot_product_attention", "rrelu", "svd_lowrank", "pca_lowrank", "uniform_", "normal_", "trunc_normal_",
    "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "sparse_", "rnn_tanh",
    "rnn_relu", "lstm", "gru",
))  # fmt: skip
# Position of the argument `training`: if it is false, the function uses no random numbers.
TRAINING_ARGUMENT = {**dict.fromkeys(_DROPOUTS, 2), "rrelu": 3}
# The functions that contain nearly all random ops of models; `rng_patches` watches them.
PATCHED: tuple[tuple[Any, str], ...] = (
    *((torch.nn.functional, name) for name in (*_DROPOUTS, "scaled_dot_product_attention", "gumbel_softmax")),
    *((torch, name) for name in ("dropout", "rand", "randn", "randint", "rand_like", "randn_like", "randint_like")),
)


class UnsliceableRandomOp(Exception):
    """Random numbers that cannot be generated for the whole batch in advance."""


def is_random_op(overload: Any) -> bool:
    """Return whether an aten op may use the generator."""
    return torch.Tag.nondeterministic_seeded in overload.tags


def may_draw(name: str) -> bool:
    """Return whether a function of torch, by its name, may use the generator."""
    if name in _PYTHON_FUNCTIONS:
        return True
    packet = getattr(aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    return packet is not None and any(is_random_op(getattr(packet, one)) for one in packet.overloads())


def is_fill(function: Any) -> bool:
    """Return whether an op only fills a tensor with random numbers."""
    return function in IN_PLACE or function in LIKE or function in NEW or function in DROPOUT


def shape_of(function: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the shape of the random numbers of an op."""
    return tuple(args[NEW[function]]) if function in NEW else tuple(args[0].shape)


def memory_order(function: Any, args: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Return the dimensions in memory order; None where memory has gaps or overlaps."""
    if function in NEW:
        return tuple(range(len(args[NEW[function]])))
    # A tensor made like one with gaps has none: its dimensions keep their order.
    tensor = torch.empty_like(args[0]) if function in LIKE or function in DROPOUT else args[0]
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim)))
    return order if tensor.permute(order).is_contiguous() else None


def empty_in_order(shape: tuple[int, ...], order: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of a shape with a memory order of its dimensions."""
    memory = like.new_empty([shape[dim] for dim in order])
    return memory.permute([order.index(dim) for dim in range(len(shape))])


def draw_whole(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...], order: tuple[int, ...]
) -> torch.Tensor:
    """Return the random numbers of an op for a tensor of another shape."""
    if function in NEW:
        at = NEW[function]
        found: torch.Tensor = function(*args[:at], list(shape), *args[at + 1 :], **kwargs)
        return found
    given = empty_in_order(shape, order, args[0])
    if function in DROPOUT:
        mask: torch.Tensor = function(given.fill_(1), *args[1:], **kwargs)[1]
        return mask
    drawn: torch.Tensor = function(given, *args[1:], **kwargs)
    return drawn


def return_part(function: Any, args: tuple[Any, ...], part: torch.Tensor) -> Any:
    """Return a slice of the random numbers as the op would have returned it."""
    if function in IN_PLACE:
        return args[0].copy_(part)
    if function in DROPOUT:
        tensor, probability = args[:2]
        mask = part.clone()
        return tensor * mask * (1 / (1 - probability) if probability < 1 else 0.0), mask
    return part.clone()
