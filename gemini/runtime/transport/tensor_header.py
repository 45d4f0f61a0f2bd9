"""Tensor header: everything about a tensor in transit; the contents are in a slab or, if small, in the header itself.

The memory layout is preserved (channels-last, transposed, a part of a larger tensor, expanded), since kernels may
round differently for another one. A tensor that is mostly gaps is sent densely and gets its gaps back on arrival; only
one that overlaps itself, or would take too much memory, arrives contiguous.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gemini.runtime.transport.shm_pool import MappedPool, SharedMemoryPool, Slab

Header = tuple[Any, ...]
INLINE = 16 << 10  # bytes: up to here a second copy costs less than sharing
_GAPS = 4  # the largest ratio of memory to contents that is sent with gaps
_SPREAD = 64 << 20  # bytes that it may take in the receiver; the gaps are never touched
_OURS = (torch.Tensor, torch.nn.Parameter)
_MAIN = torch.device("cpu")
_NUMBERS = {"float32": struct.Struct("=f"), "float64": struct.Struct("=d")}


class UnsendableTensor(Exception):
    """A tensor that cannot be sent: the caller runs the work in its own process."""


def write(pool: SharedMemoryPool, tensor: torch.Tensor) -> Header:
    """Write a tensor to the pool; return its header, which is plain data and holds small contents itself."""
    if type(tensor) in _OURS and tensor.is_cpu and _is_plain(tensor) and tensor.nbytes <= INLINE:
        contents = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        return ("inline", contents, _name(tensor.dtype), tuple(tensor.shape), (), tensor.requires_grad)
    if tensor.layout is torch.sparse_coo:
        parts = write(pool, tensor._indices()), write(pool, tensor._values())
        return ("coo", *parts, tuple(tensor.shape), tensor.is_coalesced())
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UnsendableTensor(f"a tensor of layout {tensor.layout} on {tensor.device}")
    if type(tensor) not in _OURS:
        raise UnsendableTensor(f"a tensor of class {type(tensor).__name__}")
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        resolved = torch._neg_view(plain) if plain.is_neg() else plain
        resolved = resolved.conj() if plain.is_conj() else resolved
        return ("turned", write(pool, resolved), plain.is_conj(), plain.is_neg(), tensor.requires_grad)
    strides = _layout(plain)
    if _is_mostly_gaps(plain, strides):
        if plain.is_cpu and _span(plain.shape, strides) * plain.element_size() <= _SPREAD:
            dense = write(pool, plain[_once(strides)].contiguous())
            return ("spread", dense, tuple(plain.shape), strides, tensor.requires_grad)
        strides = ()
    facts = (_name(plain.dtype), tuple(plain.shape), strides, tensor.requires_grad)
    size = _span(plain.shape, strides) * plain.element_size()
    if not size:
        return ("inline", b"", *facts)
    if size <= INLINE and plain.is_cpu:
        memory = torch.zeros(size, dtype=torch.uint8) if strides else torch.empty(size, dtype=torch.uint8)
        _fill(memory, plain, strides)
        return ("inline", memory.numpy().tobytes(), *facts)
    slab = pool.take(size)
    _fill(pool.view(slab, size), plain, strides)
    return ("slab", tuple(slab), *facts)


class TensorPart(NamedTuple):
    """A tensor in a slab that several tensors may share."""

    offset: int  # in bytes
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def like(tensor: torch.Tensor, offset: int = 0) -> TensorPart:
        """Return the part for a dense tensor like this one, with its order of dimensions."""
        strides = torch.empty_like(tensor, device="meta").stride()
        return TensorPart(offset, _name(tensor.dtype), tuple(tensor.shape), tuple(strides))

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        size: int = _dtype(self.dtype).itemsize
        return math.prod(self.shape) * size

    def on(self, slab: Slab, memory: torch.Tensor) -> tuple[Header, torch.Tensor]:
        """Return the header in advance, and the tensor, which must be written before the header is sent."""
        return ("part", tuple(slab), len(memory), *self), self.view(memory)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the bytes of the slab."""
        dtype = _dtype(self.dtype)
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset // dtype.itemsize, self.shape, self.strides)


def _fill(memory: torch.Tensor, tensor: torch.Tensor, strides: Sequence[int]) -> None:
    """Copy a tensor into bytes in a layout; dimensions with stride 0 are written once."""
    target = memory.view(tensor.dtype)
    if not strides:
        target.view(tensor.shape).copy_(tensor)
        return
    index = [0 if not stride else slice(None) for stride in strides]
    dims = [at for at, stride in enumerate(strides) if stride]
    target.as_strided([tensor.shape[at] for at in dims], [strides[at] for at in dims], 0).copy_(tensor[tuple(index)])


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor holds its contents byte by byte, without flags that must be sent."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized)
        and _is_packed(tensor)
        and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
    )


def slabs_of(header: Header | None) -> list[tuple[int, int, int]]:
    """Return the slabs that a header names."""
    if header is None or header[0] == "inline":
        return []
    if header[0] in ("spread", "turned"):
        return slabs_of(header[1])
    return [header[1]] if header[0] in ("slab", "part") else [*slabs_of(header[1]), *slabs_of(header[2])]


def read(mapped: MappedPool, header: Header) -> torch.Tensor:
    """Return the tensor of a header."""
    if header[0] == "inline":
        _, contents, name, shape, strides, requires_grad = header
        number = math.nan if shape or name not in _NUMBERS else _NUMBERS[name].unpack(contents)[0]
        if not math.isnan(number):  # such as losses; NaN has many bit patterns
            found = torch.scalar_tensor(number, dtype=_dtype(name), device=_MAIN)
        else:
            found = _copy_inline(contents, _dtype(name), shape, strides)
        if not mapped.is_main:
            found = found.to(mapped.where)
        return found.requires_grad_() if requires_grad else found
    kind, where, *rest = header
    if kind == "coo":
        values, shape, coalesced = rest
        return torch.sparse_coo_tensor(
            read(mapped, where), read(mapped, values), shape, is_coalesced=coalesced, check_invariants=False
        )
    if kind == "spread":
        return _restore_gaps(read(mapped, where), *rest)
    if kind == "turned":
        return _restore_flags(read(mapped, where), *rest)
    name, shape, strides, requires_grad = rest
    dtype = _dtype(name)
    memory = mapped.view(Slab(*where), _span(shape, strides) * dtype.itemsize)
    # Not a view: autograd restricts in-place writes to views.
    empty = torch.empty(0, dtype=dtype, device=mapped.where)
    found = empty.set_(memory.untyped_storage(), 0, shape, strides or _contiguous(shape))
    return found.requires_grad_() if requires_grad else found


def read_part(mapped: MappedPool, header: Header, opened: dict[Any, torch.Tensor]) -> torch.Tensor:
    """Return a tensor in a shared slab, with its own storage; each slab is opened once and recorded in `opened`."""
    _, slab, size, *facts = header
    if slab not in opened:
        opened[slab] = mapped.view(Slab(*slab), size)
    part = TensorPart(*facts)
    holds_slab = functools.partial(id, opened[slab])  # is freed with the storage: the slab is released after all parts
    memory = mapped.segments[slab[0]].view(slab[1] + part.offset, part.nbytes, holds_slab)
    return part._replace(offset=0).view(memory)


def _copy_inline(contents: bytes, dtype: torch.dtype, shape: tuple[int, ...], strides: Sequence[int]) -> torch.Tensor:
    """Return a tensor with its own memory."""
    if strides:
        found = torch.empty_strided(shape, strides, dtype=dtype, device=_MAIN)
    else:
        found = torch.empty(*shape or ((),), dtype=dtype, device=_MAIN)  # faster than with a tuple
    if contents:
        ctypes.memmove(found.data_ptr(), contents, len(contents))
    return found


def _restore_gaps(
    dense: torch.Tensor, shape: tuple[int, ...], strides: Sequence[int], requires_grad: bool
) -> torch.Tensor:
    """Return the tensor with its gaps."""
    found = torch.empty_strided(shape, strides, dtype=dense.dtype, device=dense.device)
    found[_once(strides)].copy_(dense)
    return found.requires_grad_() if requires_grad else found


def _restore_flags(found: torch.Tensor, is_conj: bool, is_neg: bool, requires_grad: bool) -> torch.Tensor:
    """Set the conjugate and negative bits that torch resolves lazily."""
    torch._C._set_conj(found, is_conj)
    torch._C._set_neg(found, is_neg)
    return found.requires_grad_() if requires_grad else found


def _once(strides: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of the entries to write: a dimension with stride 0 is written once."""
    return tuple(slice(None) if stride else slice(0, 1) for stride in strides)


def _layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides for the receiver; () for contiguous tensors and for those that overlap themselves."""
    if _is_packed(tensor):
        return ()
    sizes = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    end = 0  # the extent of the dimensions so far
    for stride, size in sizes:
        if stride and stride <= end:
            return ()  # it overlaps itself
        end += stride * (size - 1)
    return tuple(tensor.stride())


def _is_mostly_gaps(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Return whether a layout takes much more memory than its contents."""
    once = math.prod(size for stride, size in zip(strides, tensor.shape, strict=False) if stride)
    return bool(strides) and _span(tensor.shape, strides) > _GAPS * once


def _is_packed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the strides of a new one.

    Any stride is valid for a dimension of size 1, and such a tensor is contiguous; but the strides distinguish
    channels-last, which torch's choice of kernels and layouts depends on.
    """
    if not tensor.is_contiguous():
        return False
    return 1 not in tensor.shape or not tensor.numel() or list(tensor.stride()) == _contiguous(tensor.shape)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements of memory that a layout takes."""
    if not strides:
        return math.prod(shape)
    return 1 + sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))


def _contiguous(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor."""
    strides, step = [0] * len(shape), 1
    for at in reversed(range(len(shape))):
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
