"""Handing out: what is known before a step is computed for the batch, and every micro-batch gets its part of it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any

from gemini.batch_analysis.batch_kinds import Kind, Opaque, Pointers, Replicate, Shard
from gemini.batch_analysis.microbatch_weights import Own, Part, Several, Share, Whole
from gemini.batch_analysis.op_call import Result, Value

_MOST = 1 << 14  # entries a sample of a value that is put in from outside


def is_divisible(result: Result, samples: int) -> bool:
    """Whether a result has so many entries a sample, and not too many to be sent along."""
    if not isinstance(result.batch, int) or result.shape[result.batch] % samples:
        return False
    return 0 < prod(result.shape) // samples <= _MOST


def part_of(value: Value, result: Result, samples: int) -> tuple[Kind, Share] | None:
    """Kind and share of a value that is handed out; None where it cannot be."""
    if not value.known or value.grad:
        return None
    if result.batch is None and prod(result.shape) <= _MOST:
        return Replicate(), Whole(value.key)
    if is_divisible(result, samples) and isinstance(result.batch, int):
        kind = Shard(result.batch, result.shape[result.batch] // samples)
        return kind, Part(value.key, kind)
    return None


def pointers_of(value: Value, result: Result, samples: int, rows: int) -> tuple[Kind, Share] | None:
    """The same of a value that is numbers of rows."""
    found = part_of(value, result, samples)
    if found is None or not isinstance(found[0], Shard):
        return None
    return Pointers(found[0], rows), Own(value.key, found[0], rows)


def handed_out(
    results: Sequence[tuple[Any, Result]], values: Any, samples: int, pointers: Mapping[Hashable, int]
) -> tuple[list[Kind], Share] | None:
    """Kinds and share of what a function returns: several tensors of which nothing else follows, or numbers of rows."""
    if len(results) == 1:
        ((key, result),) = results
        one = pointers_of(values[key], result, samples, pointers[key]) if key in pointers else None
        return None if one is None else ([one[0]], one[1])
    places = [key.path for key, _ in results]
    if any(len(path) != 1 or path[0][0] != "i" for path in places):
        return None
    if not all(isinstance(values[key].kind, Opaque) for key, _ in results):
        return None
    found = [
        pointers_of(values[key], result, samples, pointers[key])
        if key in pointers
        else part_of(values[key], result, samples)
        for key, result in results
    ]
    shares = tuple((path[0][1], one[1]) for path, one in zip(places, found, strict=True) if one is not None)
    kinds = [values[key].kind if one is None else one[0] for (key, _), one in zip(results, found, strict=True)]
    return (kinds, Several(shares)) if shares else None
