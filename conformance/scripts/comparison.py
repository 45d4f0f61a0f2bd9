"""Whether two runs of a program printed and saved the same, up to rounding.

Text must be equal but for numbers with a decimal point. Those, and saved tensors, may differ by ten times what two runs
under `python` differ by, but at least by a floor: some roundings, grown by some steps of training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

FACTOR = 10  # how much further than the noise of `python` itself
_NUMBER = re.compile(r"[-+]?(?:\d+\.\d+(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\binf\b|\bnan\b)")
_SMALL = 0.01  # numbers are compared relative to their size, those below it to this


class Number(NamedTuple):
    value: float
    unit: float  # of the last digit printed


def numbers(text: str) -> list[Number]:
    """Numbers with a decimal point, in order."""
    return [_number(found) for found in _NUMBER.findall(text)]


def _number(text: str) -> Number:
    mantissa, _, exponent = text.lower().partition("e")
    digits = len(mantissa.partition(".")[2])
    return Number(float(text), 10.0 ** (int(exponent or 0) - digits))


def template(text: str) -> str:
    """The text without those numbers, and without how wide they were printed."""
    return re.sub(r"[ \t]+", " ", _NUMBER.sub("#", text))


def off(one: Number, other: Number) -> float:
    """How far two printed numbers are apart, relative to their size."""
    if one.value == other.value or (one.value != one.value and other.value != other.value):
        return 0.0
    return abs(one.value - other.value) / max(abs(one.value), _SMALL)


def apart(one: Number, other: Number) -> float:
    """The same, beyond the last digit: numbers between which there is next to nothing may be rounded apart."""
    return max(0.0, off(one, other) - 1.01 * max(one.unit, other.unit) / max(abs(one.value), _SMALL))


def printed(one: str, other: str) -> list[float]:
    """The deviation of every printed number from the first run's; what was printed must be alike."""
    return [apart(a, b) for a, b in zip(numbers(one), numbers(other))]


def grown(deviations: Sequence[float]) -> list[float]:
    """The largest so far: what has drifted apart once stays so."""
    largest, result = 0.0, []
    for deviation in deviations:
        largest = max(largest, deviation)
        result.append(largest)
    return result


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of what was saved, with its place."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from tensors(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from tensors(entry, f"{name}[{index}]")
    else:
        yield name, value


def load(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, by place."""
    return dict(tensors(torch.load(path, map_location="cpu", weights_only=False)))


def saved(one: dict[str, Any], other: dict[str, Any]) -> tuple[list[str], dict[str, float]]:
    """What is not even alike, and the deviation of every tensor that is."""
    faults = [f"{name} is not in both" for name in sorted(one.keys() ^ other.keys())]
    deviations = {}
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if isinstance(a, float) and isinstance(b, float):
                deviations[name] = abs(a - b) / max(abs(a), _SMALL)
            elif a != b:
                faults.append(f"{name}: {a!r} became {b!r}")
        elif (a.shape, a.dtype, a.requires_grad, type(a)) != (b.shape, b.dtype, b.requires_grad, type(b)):
            faults.append(f"{name}: {_described(a)} became {_described(b)}")
        elif not a.is_floating_point():
            if not torch.equal(a, b):
                faults.append(f"{name}: other integers")
        elif a.numel():
            a, b = a.detach().double(), b.detach().double()
            distance = 0.0 if torch.equal(a, b) else (a - b).abs().max().item()
            deviations[name] = distance / max(a.abs().max().item(), _SMALL)
    return faults, deviations


def _described(tensor: torch.Tensor) -> str:
    gradient = ", requires_grad" if tensor.requires_grad else ""
    return f"{type(tensor).__name__}{tuple(tensor.shape)} of {tensor.dtype}{gradient}"
