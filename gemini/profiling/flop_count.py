"""FLOP count: floating-point operations and bytes of a computation, counted per kernel.

A dispatch mode sees every kernel of forward and backward, below modules and autograd. On meta tensors nothing is
computed, so models of any size can be counted. Matrix products, convolutions and attention use torch's formulas; any
other kernel counts one operation per output element. The bytes of a kernel are those of its arguments and results;
kernels that return views move none.
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
class KernelWork:
    """One kernel: element type, use of matrix units, operations, bytes, and number of occurrences."""

    dtype: str
    matrix: bool
    flops: int
    nbytes: int
    count: int = 1


@dataclass(frozen=True)
class KernelCounts:
    """The kernels of a computation; equal kernels are one entry."""

    kernels: tuple[KernelWork, ...] = ()

    @property
    def flops(self) -> int:
        """Total floating-point operations."""
        return sum(kernel.flops * kernel.count for kernel in self.kernels)

    @property
    def nbytes(self) -> int:
        """Total bytes read and written."""
        return sum(kernel.nbytes * kernel.count for kernel in self.kernels)

    @cached_property
    def count(self) -> int:
        """The number of kernels."""
        return sum(kernel.count for kernel in self.kernels)


class WorkCounter(TorchDispatchMode):  # type: ignore[misc]
    """Counts the kernels that run inside it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default implementation would import the compiler

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, bool, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        arguments, made = tensors_of((*args, *kwargs.values())), tensors_of((out,))
        if made and not _is_view(func, arguments, made):
            flops = _flops(func._overloadpacket, args, kwargs, out)
            dtype = str(arguments[0].dtype if arguments else made[0].dtype).removeprefix("torch.")
            # A gather reads only as much of its first argument as it returns.
            read = [made[0], *arguments[1:]] if str(func._overloadpacket) in _GATHERS else arguments
            size = sum(_nbytes(tensor) for tensor in (*read, *made))
            count = flops if flops is not None else sum(tensor.numel() for tensor in made)
            self.seen[dtype, flops is not None, count, size] += 1
        return out

    def take(self) -> KernelCounts:
        """Return the work so far and reset the counter."""
        work = KernelCounts(tuple(KernelWork(*key, count) for key, count in self.seen.items()))
        self.seen.clear()
        return work


def memory_traffic(sizes: int, dtype: str = "float32") -> KernelCounts:
    """Return the minimal work of a computation known only by its arguments and results: move them once."""
    return KernelCounts((KernelWork(dtype, False, 0, sizes),))


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments or results of a kernel, also in lists."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value)
    return found


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a kernel accesses; fewer than the elements' for an expanded tensor."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout == torch.strided else ():
        count *= size if stride or size <= 1 else 1
    return int(count if tensor.layout == torch.strided else tensor.numel()) * int(tensor.element_size())


def _is_view(func: Any, arguments: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    return bool(func.is_view) or (not func._schema.is_mutable and any(out is x for out in made for x in arguments))


def _flops(packet: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """Return the operations of a kernel on matrix units; None for any other kernel."""
    factor = _ATTENTION.get(str(packet))
    formula = flop_registry.get(packet)
    try:
        if factor is not None:  # query, key and value follow the gradient in backward
            query, key = (args[1], args[2]) if factor > 4 else (args[0], args[1])
            return int(factor * query.numel() * key.shape[-2])
        return None if formula is None else int(formula(*args, **kwargs, out_val=out))
    except (
        AssertionError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
    ):  # arguments that the formula does not support
        return None


# Kernels that read only as much of their first argument as they return.
_GATHERS = {"aten.embedding", "aten.index_select", "aten.index", "aten.gather", "aten.take"}

# Fused attention on the CPU, for which torch has no formula: two products forward, five backward.
_ATTENTION = {
    "aten._scaled_dot_product_flash_attention_for_cpu": 4,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": 10,
}
