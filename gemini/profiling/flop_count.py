"""Work: the floating-point operations and bytes of a piece of computation, counted op by op.

A dispatch mode sees every kernel that forward and backward run, below modules and autograd. On meta tensors
nothing is computed, so models of any size can be counted. Operations of matrix products, convolutions and
attention come from torch's own formulas; any other kernel counts one operation an output element. The bytes of a
kernel are those of its arguments and results; kernels that return views move none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Kernel:
    """One kernel: element type, whether it runs on matrix units, operations, bytes; and how often it occurs."""

    dtype: str
    matrix: bool
    flops: int
    nbytes: int
    count: int = 1


@dataclass(frozen=True)
class Work:
    """What a computation does, as kernels; equal kernels are one entry."""

    kernels: tuple[Kernel, ...] = ()

    @property
    def flops(self) -> int:
        """Floating-point operations in all."""
        return sum(kernel.flops * kernel.count for kernel in self.kernels)

    @property
    def nbytes(self) -> int:
        """Bytes read and written in all."""
        return sum(kernel.nbytes * kernel.count for kernel in self.kernels)

    @cached_property
    def count(self) -> int:
        """The number of kernels."""
        return sum(kernel.count for kernel in self.kernels)


class WorkCounter(TorchDispatchMode):  # type: ignore[misc]
    """Counts the work of what runs inside it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to say so would load the compiler

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, bool, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given, made = tensors_of((*args, *kwargs.values())), tensors_of((out,))
        if made and not _is_view(func, given, made):
            flops = _flops(func._overloadpacket, args, kwargs, out)
            dtype = str(given[0].dtype if given else made[0].dtype).removeprefix("torch.")
            # A gather reads as much of its first argument as it returns.
            read = [made[0], *given[1:]] if str(func._overloadpacket) in _GATHERS else given
            size = sum(_nbytes(tensor) for tensor in (*read, *made))
            count = flops if flops is not None else sum(tensor.numel() for tensor in made)
            self.seen[dtype, flops is not None, count, size] += 1
        return out

    def take(self) -> Work:
        """The work so far; counting starts anew."""
        work = Work(tuple(Kernel(*key, count) for key, count in self.seen.items()))
        self.seen.clear()
        return work


def bytes_only(sizes: int, dtype: str = "float32") -> Work:
    """The least a computation does that is only known by its arguments and results: move them once."""
    return Work((Kernel(dtype, False, 0, sizes),))


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the arguments or results of a kernel, which are nested in lists at most."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value)
    return found


def _nbytes(tensor: torch.Tensor) -> int:
    """The bytes a kernel has to touch; an expanded tensor has fewer than its elements take."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout == torch.strided else ():
        count *= size if stride or size <= 1 else 1
    return int(count if tensor.layout == torch.strided else tensor.numel()) * int(tensor.element_size())


def _is_view(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    return bool(func.is_view) or (not func._schema.is_mutable and any(out is x for out in made for x in given))


def _flops(packet: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """The operations of a kernel on matrix units; None for any other kernel."""
    factor = _ATTENTION.get(str(packet))
    formula = flop_registry.get(packet)
    try:
        if factor is not None:  # query, key and value follow the gradient in backward
            query, key = (args[1], args[2]) if factor > 4 else (args[0], args[1])
            return int(factor * query.numel() * key.shape[-2])
        return None if formula is None else int(formula(*args, **kwargs, out_val=out))
    except (AssertionError, TypeError, ValueError, IndexError, AttributeError):  # a form that the formula does not know
        return None


# Kernels that read as much of their first argument as they return, not all of it.
_GATHERS = {"aten.embedding", "aten.index_select", "aten.index", "aten.gather", "aten.take"}

# Fused attention on the CPU, for which torch has no formula: two products forward, five backward.
_ATTENTION = {
    "aten._scaled_dot_product_flash_attention_for_cpu": 4,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": 10,
}
