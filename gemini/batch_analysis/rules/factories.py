"""Factories: tensors made from sizes.

A tensor with a size that counts samples is sharded in that dimension; `arange` of it returns the sample indices.
"""

from __future__ import annotations

from typing import Any

from gemini.batch_analysis.batch_kinds import Kind, Replicate, SampleIndices, Shard, SortedRows
from gemini.batch_analysis.op_call import AnalysisRefused, OpCall, SampleCount, TensorValue, UnknownNumber
from gemini.batch_analysis.rules.registry import rule


def _from_sizes(call: OpCall, sizes: list[Any]) -> Kind:
    counted = [at for at, size in enumerate(sizes) if isinstance(size, SampleCount)]
    if len(counted) != 1 or any(isinstance(size, (UnknownNumber, TensorValue)) for size in sizes):
        raise AnalysisRefused(f"{call.name} of a size that depends on the number of samples")
    return Shard(counted[0], sizes[counted[0]] // call.samples)


def _flatten_sizes(parts: tuple[Any, ...]) -> list[Any]:
    if len(parts) == 1 and isinstance(parts[0], (tuple, list)):
        return list(parts[0])
    return [part for part in parts if isinstance(part, (int, UnknownNumber))]


@rule("zeros", "ones", "empty", "rand", "randn", "new_zeros", "new_ones", "new_empty", counts=True)
def fill(call: OpCall) -> Kind:
    """Handle factories with equal or identically distributed entries; a tensor used only for its type is ignored."""
    args = call.args[1:] if call.name.startswith("new_") else call.args
    return _kind_from_sizes(call, args)


def _kind_from_sizes(call: OpCall, args: tuple[Any, ...]) -> Kind:
    sizes = list(call.kwargs["size"]) if "size" in call.kwargs else _flatten_sizes(args)
    counted = any(isinstance(size, (SampleCount, UnknownNumber)) for size in sizes)
    # On a tape sizes are plain numbers: whether one counts samples is not guessed.
    if not counted and (call.traced or all(size == 0 or size % call.samples for size in sizes)):
        return Replicate()
    return _from_sizes(call, sizes)


@rule("full", "new_full", counts=True)
def full(call: OpCall) -> Kind:
    """`(size, value)`."""
    args = call.args[1:] if call.name == "new_full" else call.args
    value = call.kwargs.get("fill_value", args[1] if len(args) > 1 else None)
    call.constant(value)
    return _kind_from_sizes(call, args[:1])


@rule("randint", counts=True)
def randint(call: OpCall) -> Kind:
    """`(low, high, size)`."""
    sizes = [part for part in call.args if isinstance(part, (tuple, list))]
    return _kind_from_sizes(call, tuple(sizes[:1]))


@rule("new_tensor")
def new_tensor(call: OpCall) -> Kind:
    """Only the type of the tensor matters."""
    call.constant(call.args[1:])
    return Replicate()


@rule("arange", counts=True)
def arange(call: OpCall) -> Kind:
    """Return the indices of samples: from 0 in steps of 1 to their number."""
    numbers = [part for part in call.args if not isinstance(part, TensorValue)]
    if "end" in call.kwargs:
        numbers.append(call.kwargs["end"])
    end = numbers[-1] if len(numbers) <= 2 else None
    start = numbers[0] if len(numbers) == 2 else call.kwargs.get("start", 0)
    plain = (
        isinstance(end, SampleCount)
        and end % call.samples == 0
        and not isinstance(start, (SampleCount, UnknownNumber))
        and start == 0
    )
    if not plain or call.kwargs.get("step", 1) != 1:
        raise AnalysisRefused("arange up to a number that depends on the number of samples")
    entries = int(end) // call.samples  # type: ignore[arg-type]
    return SampleIndices(0) if entries == 1 else SortedRows("numbers", None, entries)
