"""Tensors on the way: a header that says everything, and the contents in a slab or, if small, in the header itself.

The memory layout travels along where it is dense (channels-last, transposed), since kernels may round differently for
another one; anything else arrives contiguous.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from gemini.runtime.transport.slabs import Pool, Slab, Window

Header = tuple[Any, ...]
INLINE = 16 << 10  # bytes: up to here copying them once more costs less than sharing them
_OURS = (torch.Tensor, torch.nn.Parameter)


class Unsendable(Exception):
    """A tensor that cannot cross: the caller keeps the work at home."""


def write(pool: Pool | None, tensor: torch.Tensor) -> Header:
    """Put a tensor on its way; the header is plain data, and holds the contents too where there is no pool."""
    if type(tensor) in _OURS and tensor.is_cpu and _is_plain(tensor) and tensor.nbytes <= INLINE:
        contents = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        return ("inline", contents, _name(tensor.dtype), tuple(tensor.shape), (), tensor.requires_grad)
    if tensor.layout is torch.sparse_coo:
        parts = write(pool, tensor._indices()), write(pool, tensor._values())
        return ("coo", *parts, tuple(tensor.shape), tensor.is_coalesced())
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise Unsendable(f"a tensor of layout {tensor.layout} on {tensor.device}")
    if type(tensor) not in _OURS:
        raise Unsendable(f"a tensor of class {type(tensor).__name__}")
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    order = _dense_order(plain)
    dense = plain.permute(order) if order else plain  # contiguous, or about to be
    facts = (_name(plain.dtype), tuple(plain.shape), order, tensor.requires_grad)
    size = dense.numel() * dense.element_size()
    if pool is None or not size or (size <= INLINE and plain.is_cpu):
        return ("inline", dense.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if size else b"", *facts)
    slab = pool.take(size)
    pool.view(slab, size).view(plain.dtype).view(dense.shape).copy_(dense)
    return ("slab", tuple(slab), *facts)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is, byte by byte, what it holds, and nothing else is to be told of it."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized)
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
    )


def slabs(header: Header | None) -> list[tuple[int, int, int]]:
    """The slabs that a header names."""
    if header is None or header[0] not in ("slab", "coo"):
        return []
    return [header[1]] if header[0] == "slab" else [*slabs(header[1]), *slabs(header[2])]


def read(window: Window, header: Header) -> torch.Tensor:
    """The tensor of a header."""
    kind, where, *rest = header
    if kind == "coo":
        values, shape, coalesced = rest
        return torch.sparse_coo_tensor(
            read(window, where), read(window, values), shape, is_coalesced=coalesced, check_invariants=False
        )
    name, shape, order, requires_grad = rest
    dtype = _dtype(name)
    if kind == "inline":
        found = _copied(where, dtype, shape, order)
        if window.where.type != "cpu":
            found = found.to(window.where)
    else:
        memory = window.look(Slab(*where), math.prod(shape) * dtype.itemsize)
        # Not a view of anything: autograd treats writes to views of another's results with suspicion.
        empty = torch.empty(0, dtype=dtype, device=window.where)
        found = empty.set_(memory.untyped_storage(), 0, shape, _strides(shape, order))
    return found.requires_grad_() if requires_grad else found


def _copied(contents: bytes, dtype: torch.dtype, shape: tuple[int, ...], order: Sequence[int]) -> torch.Tensor:
    """A tensor with memory of its own."""
    if order:
        found = torch.empty_strided(shape, _strides(shape, order), dtype=dtype, device="cpu")
    else:
        found = torch.empty(shape, dtype=dtype, device="cpu")
    if contents:
        ctypes.memmove(found.data_ptr(), contents, len(contents))
    return found


def _dense_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions from slowest to fastest, if the tensor is dense in another order than that of its dimensions."""
    if tensor.is_contiguous():
        return ()
    order = sorted(range(tensor.dim()), key=lambda at: (-tensor.stride(at), at))
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


def _strides(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """The strides of a tensor whose dimensions, put in `order`, are contiguous."""
    strides, step = [0] * len(shape), 1
    for at in reversed(order or range(len(shape))):
        strides[at] = step
        step *= shape[at]
    return strides


@functools.lru_cache(maxsize=64)
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=64)
def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
