"""Batch dimension: the sample dimension of each input, and other batches derived from the captured one.

The batch dimension is found by experiment, not assumed to be the first. A candidate layout assigns a sample dimension
to every input; it is accepted if the model, run on two samples and on the second of them alone, returns the same
result for that sample (four and two, if it rejects one). The time dimension of a recurrent or attention model fails
that test.

Inputs may be packed: the patches of all pictures concatenated, `(pictures · patches, width)`, beside one row of sizes
per picture. Such an input has a *factor*, its rows per sample, equal for all samples.

    half      the second half of the samples (or twice the batch, if it has one sample)
    second    the same sizes, other contents
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import nn

from gemini.capture.warmup import Warmup
from gemini.ir.call_binding import ModelCall
from gemini.ir.encode import tensors

_PACKED_TRIES = 3  # numbers of samples that are tried for packed inputs


@dataclass(frozen=True)
class BatchLayout:
    """The sample dimension of each input tensor (None: no samples), and the number of samples.

    `factors` are the entries per sample in that dimension; empty: one each.
    """

    dims: tuple[int | None, ...]
    size: int
    factors: tuple[int, ...] = ()

    def sample_dims(self) -> list[tuple[int | None, int]]:
        """Return the sample dimension and factor of each input."""
        return list(zip(self.dims, self.factors or (1,) * len(self.dims), strict=True))

    def count_samples(self, inputs: Sequence[torch.Tensor]) -> int | None:
        """Return the number of samples of these tensors; None where they disagree or have none."""
        found = set()
        for tensor, (dim, factor) in zip(inputs, self.sample_dims(), strict=True):
            if dim is not None:
                rows, rest = divmod(tensor.shape[dim], factor) if tensor.dim() > dim else (0, 1)
                found.add(None if rest else rows)
        return found.pop() if len(found) == 1 else None

    def narrow(self, inputs: Sequence[torch.Tensor], start: int, length: int) -> list[torch.Tensor]:
        """Return the inputs of a range of samples, as views."""
        return [
            tensor if dim is None else tensor.narrow(dim, start * factor, length * factor)
            for tensor, (dim, factor) in zip(inputs, self.sample_dims(), strict=True)
        ]

    def copy(self, inputs: Sequence[torch.Tensor], start: int, length: int) -> list[torch.Tensor]:
        """Return the inputs of a range of samples, as copies."""
        return [
            tensor if part is tensor else _like(part.detach().clone(), tensor)
            for tensor, part in zip(inputs, self.narrow(inputs, start, length), strict=True)
        ]

    def repeat(self, inputs: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
        """Return the samples repeated `count` times."""
        return [
            _like(torch.cat([tensor.detach()] * count, dim), tensor) if dim is not None else tensor
            for tensor, dim in zip(inputs, self.dims, strict=True)
        ]

    def resize(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """Return a batch of another size, and that size."""
        if self.size == 1:
            return self.repeat(inputs, 2), 2
        half = self.size // 2
        return self.copy(inputs, self.size - half, half), half


def _like(tensor: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_(original.requires_grad)


def candidate_layouts(inputs: Sequence[torch.Tensor]) -> Iterator[BatchLayout]:
    """Yield plausible layouts, the most common first."""
    seen = set()
    for dim in range(3):
        counted = [tensor.shape[dim] for tensor in inputs if tensor.dim() > dim and tensor.layout is torch.strided]
        if not counted:
            continue
        for size in _sizes(counted):
            dims = tuple(_dim_of(tensor, dim, size) for tensor in inputs)
            # A tensor whose last two dimensions have that size may be a table (a mask over pairs of positions).
            tables = [index for index, tensor in enumerate(inputs) if tensor.shape[-2:] == (size, size)]
            without = tuple(None if index in tables else found for index, found in enumerate(dims))
            for choice in (dims, without):
                if choice not in seen and size > 0 and any(found is not None for found in choice):
                    seen.add(choice)
                    yield BatchLayout(choice, size)
    yield from _packed_layouts(inputs)


def _sizes(counted: list[int]) -> list[int]:
    """Return numbers of samples to try, of the sizes of a dimension: the most common, and that of the first input.

    One is tried last: states of recurrent layers, which may outnumber the other inputs, have layers in dimension 0.
    """
    found = Counter(counted).most_common(1)
    several = Counter(size for size in counted if size > 1).most_common(1)
    sizes = dict.fromkeys((*(size for size, _ in (*several, *found)), counted[0]))
    return sorted(sizes, key=lambda size: size == 1)


def _packed_layouts(inputs: Sequence[torch.Tensor]) -> Iterator[BatchLayout]:
    """Yield layouts with packed inputs: the samples are the rows of another input, or the common divisor of all."""
    rows = [tensor.shape[0] if tensor.dim() and tensor.layout is torch.strided else 0 for tensor in inputs]
    counted = Counter(count for count in rows if count > 1)
    sizes = [size for size, _ in sorted(counted.items(), key=lambda item: (-item[1], item[0]))]
    for size in dict.fromkeys((*sizes[:_PACKED_TRIES], gcd(*counted))):
        if size < 2:  # 0: no input has several rows
            continue
        factors = tuple(count // size if count % size == 0 and count else 0 for count in rows)
        if max(factors) > 1:
            yield BatchLayout(tuple(0 if factor else None for factor in factors), size, tuple(f or 1 for f in factors))


def _dim_of(tensor: torch.Tensor, dim: int, size: int) -> int | None:
    if tensor.layout is not torch.strided:  # a sparse tensor cannot be narrowed
        return None
    if tensor.dim() > dim and tensor.shape[dim] == size:
        return dim
    matches = [index for index, length in enumerate(tensor.shape) if length == size and size > 1]
    return matches[0] if len(matches) == 1 else None


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode by flag only: a `train()` method of the model may do more."""
    flags = [(module, module.training) for module in model.modules()]
    for module, _ in flags:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in flags:
            module.training = flag


def find_batch_layout(
    model: nn.Module, call: ModelCall, warmup: Warmup, known: BatchLayout | None = None
) -> BatchLayout | None:
    """Return the layout under which samples are independent; else the first that the model accepts; else None.

    `known`: the layout, if the caller knows it.
    """
    if known is not None and (layout := _fit_layout(known, call.tensors)) is not None:
        return layout
    runnable: BatchLayout | None = None
    if any(tensor.device.type == "meta" for tensor in (*call.tensors, *model.parameters())):
        return next(candidate_layouts(call.tensors), None)
    for layout in candidate_layouts(call.tensors):
        if layout.size == 1:
            return runnable or layout
        verdict = _are_independent(model, call, layout, warmup)
        if verdict is None and layout.size >= 4:  # one sample may be too few, for statistics or a check of the model
            verdict = _are_independent(model, call, layout, warmup, few=2)
        if verdict:
            return layout
        if verdict is not None:
            runnable = runnable or layout
    return runnable


def _fit_layout(layout: BatchLayout, inputs: Sequence[torch.Tensor]) -> BatchLayout | None:
    """Return the layout with the number of samples of these tensors; None where it does not fit them."""
    if len(layout.dims) != len(inputs):
        return None
    size = layout.count_samples(inputs)
    return None if size is None else replace(layout, size=size)


def _are_independent(
    model: nn.Module, call: ModelCall, layout: BatchLayout, warmup: Warmup, few: int = 1
) -> bool | None:
    """Return whether the results of `few` samples depend on them alone; None where the model rejects the sizes."""
    results = []
    for start, length in ((0, 2 * few), (few, few)):
        args, kwargs = call.arguments(layout.copy(call.tensors, start, length))
        try:
            with eval_mode(model):
                results.append([tensor for _, tensor in tensors(model(*args, **kwargs))])
        except Exception:
            warmup.discard_run()
            return None
        warmup.discard_run()  # changes that remain are those of the whole batch
    pair, single = results
    if len(pair) != len(single):
        return False
    verdicts = [_second_equals(two, one, few) for two, one in zip(pair, single, strict=True)]
    found = [verdict for verdict in verdicts if verdict is not None]
    return bool(found) and sum(found) * 2 > len(found)


def _second_equals(two: torch.Tensor, one: torch.Tensor, few: int = 1) -> bool | None:
    """Return whether `one` is the second half of `two`; None where the size does not depend on the batch.

    Or the second half of every `2 * few` rows, where samples are interleaved: one time step after the other.
    """
    if two.dim() != one.dim() or two.shape == one.shape:
        return None
    dims = [dim for dim in range(two.dim()) if two.shape[dim] != one.shape[dim]]
    if len(dims) != 1 or two.shape[dims[0]] != 2 * one.shape[dims[0]]:
        return False
    length = one.shape[dims[0]]
    if _near(two.narrow(dims[0], length, length), one):
        return True
    if length == few or length % few:
        return False
    steps = two.unflatten(dims[0], (length // few, 2 * few)).narrow(dims[0] + 1, few, few)
    return _near(steps.flatten(dims[0], dims[0] + 1), one)


def _near(half: torch.Tensor, one: torch.Tensor) -> bool:
    if not one.is_floating_point() or not one.numel():
        return bool(torch.equal(half, one))
    largest = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return bool(torch.allclose(half, one, rtol=1e-3, atol=1e-4 * (1 + largest), equal_nan=True))


def second_batches(call: ModelCall, layout: BatchLayout | None) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield batches of the same sizes with other contents, the most different first; the model may reject some."""
    generator = torch.Generator().manual_seed(0)
    if all(tensor.device.type != "meta" for tensor in call.tensors):
        yield "other contents", [_shuffle(tensor, generator) for tensor in call.tensors]
    if layout is not None and layout.size > 1:
        yield (
            "other order of samples",
            [
                _like(tensor.detach().roll(factor, dim), tensor) if dim is not None else tensor
                for tensor, (dim, factor) in zip(call.tensors, layout.sample_dims(), strict=True)
            ],
        )


def _shuffle(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.numel() < 2 or tensor.layout is not torch.strided:
        return tensor
    order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
    return _like(tensor.detach().reshape(-1)[order].reshape(tensor.shape), tensor)
