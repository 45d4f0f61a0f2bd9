"""Split backward: linear, convolution and embedding that delay weight gradients, installed once per process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gemini.step.delayed_weight_grads import STORE, GradientSums, as_rows

_linear, _embedding = F.linear, F.embedding
_convolutions: dict[int, Callable[..., torch.Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def install() -> None:
    """Install the replacements, which use the store while it is active; once per process."""
    if F.linear is linear:
        return
    F.linear, F.embedding = linear, embedding
    for dims, original in _convolutions.items():
        setattr(F, f"conv{dims}d", functools.wraps(original)(functools.partial(_convolution, dims)))


# ── linear ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer, as `torch.nn.functional.linear`."""
    if STORE.active and STORE.accepts(input, weight, bias) and input.dtype is weight.dtype:
        made: Tensor = _Linear.apply(input, weight, bias)
        return made
    return _linear(input, weight, bias)


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(given)
        ctx.weight, ctx.bias = weight, bias  # not saved tensors: a checkpoint would return copies
        made = _linear(given, weight, bias)
        # Autograd forbids in-place writes to views that a custom function returns; no other tensor shares this one.
        return torch.ops.aten._unsafe_view(made, made.shape) if made._is_view() else made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (given,), weight = ctx.saved_tensors, ctx.weight
        back = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        bias = ctx.bias if ctx.needs_input_grad[2] else None
        if STORE.is_collecting():
            # Detached: the graph would retain the stage's inputs and their gradients until then.
            STORE.delay(functools.partial(_add_linear, weight, bias, gradient, given.detach()))
            return back, None, None
        rows = as_rows(gradient)
        return back, rows.t().mm(as_rows(given)), None if bias is None else rows.sum(0)


def _add_linear(weight: Tensor, bias: Tensor | None, gradient: Tensor, given: Tensor, sums: GradientSums) -> None:
    rows, columns = as_rows(gradient).t(), as_rows(given)
    total, is_first = sums.into(weight)
    if is_first:
        torch.mm(rows, columns, out=total)
    else:
        total.addmm_(rows, columns)
    if bias is not None:
        _add(bias, rows.sum(1), sums)


def _add(parameter: Tensor, part: Tensor, sums: GradientSums) -> None:
    total, is_first = sums.into(parameter)
    if is_first:
        total.copy_(part)
    else:
        total.add_(part)


# ── convolution ────────────────────────────────────────────────────────────────────────────────────────────────────
def _convolution(  # noqa: PLR0917
    dims: int, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    if (
        STORE.active
        and STORE.accepts(input, weight, bias)
        and input.dtype is weight.dtype
        and input.dim() == dims + 2
        and padding != "same"
    ):
        shifts = [_each(one, dims) for one in (stride, 0 if padding == "valid" else padding, dilation)]
        made: Tensor = _Convolution.apply(input, weight, bias, shifts, groups)
        return made
    return _convolutions[dims](input, weight, bias, stride, padding, dilation, groups)


def _each(value: Any, dims: int) -> list[int]:
    found = [value] if isinstance(value, int) else list(value)
    return found * dims if len(found) == 1 else found


class _Convolution(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, shifts: list[list[int]], groups: int
    ) -> Tensor:
        ctx.save_for_backward(given)
        ctx.weight, ctx.bias, ctx.shifts, ctx.groups = weight, bias, shifts, groups
        return _convolutions[len(shifts[0])](given, weight, bias, *shifts, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (given,), weight = ctx.saved_tensors, ctx.weight
        bias = ctx.bias if ctx.needs_input_grad[2] else None
        wants, collects = bool(ctx.needs_input_grad[0]), STORE.is_collecting()
        given = given.detach() if collects else given
        run = functools.partial(_convolution_backward, gradient, given, weight, bias, ctx.shifts, ctx.groups)
        if collects:
            STORE.delay(functools.partial(_add_convolution, weight, bias, run))
            return (run([True, False, False])[0] if wants else None), None, None, None, None
        back, own, offset = run([wants, True, bias is not None])
        return back, own, offset, None, None


def _convolution_backward(  # noqa: PLR0917
    gradient: Tensor, given: Tensor, weight: Tensor, bias: Tensor | None, shifts: list[list[int]], groups: int,
    mask: list[bool],
) -> Any:  # fmt: skip
    sizes = None if bias is None else list(bias.shape)
    zeros = [0] * len(shifts[0])
    return torch.ops.aten.convolution_backward(gradient, given, weight, sizes, *shifts, False, zeros, groups, mask)


def _add_convolution(weight: Tensor, bias: Tensor | None, run: Callable[..., Any], sums: GradientSums) -> None:
    _, own, offset = run([False, True, bias is not None])
    _add(weight, own, sums)
    if bias is not None:
        _add(bias, offset, sums)


# ── embedding ──────────────────────────────────────────────────────────────────────────────────────────────────────
def embedding(  # noqa: PLR0917
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Look up embeddings, as `torch.nn.functional.embedding`."""
    usual = max_norm is None and not scale_grad_by_freq and not sparse
    inside = padding_idx is None or -weight.shape[0] <= padding_idx < weight.shape[0]
    if STORE.active and usual and inside and STORE.accepts(input, weight):
        made: Tensor = _Embedding.apply(input, weight, padding_idx)
        return made
    return _embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


class _Embedding(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, places: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(places)
        ctx.weight = weight
        ctx.padding = -1 if padding is None else padding % weight.shape[0]
        return _embedding(places, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (places,), weight = ctx.saved_tensors, ctx.weight
        if STORE.is_collecting():
            STORE.delay(functools.partial(_add_embedding, weight, ctx.padding, gradient, places))
            return None, None, None
        count = weight.shape[0]
        return None, torch.ops.aten.embedding_dense_backward(gradient, places, count, ctx.padding, False), None


def _add_embedding(weight: Tensor, padding: int, gradient: Tensor, places: Tensor, sums: GradientSums) -> None:
    total, is_first = sums.into(weight)
    if is_first:
        total.zero_()
    rows, at = as_rows(gradient), places.reshape(-1)
    if padding >= 0:
        used = at != padding
        rows, at = rows[used], at[used]
    total.index_add_(0, at, rows)
