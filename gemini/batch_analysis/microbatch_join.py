"""Joining micro-batches: whole-batch values from those of the micro-batches, and the tail that reads them.

    stage 0, 1 …     F0 F1 F2 F3                 B3 B2 B1 B0
    tail                          ▸ join ▸ run ▸ split

The tail is the end of a step that couples samples; it runs once, on the whole batch. Stages run by micro-batches; the
values that the tail reads are joined in the order of the samples, the tail runs forward and backward with the loss, and
the gradients of its inputs are split into those of the micro-batches. So no micro-batch begins its backward before the
last one has passed all stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemini.batch_analysis.batch_kinds import Partial, Replicate, Shard
from gemini.batch_analysis.microbatch_weights import weigh

JoinKind = Shard | Replicate | Partial


@dataclass(frozen=True)
class Tail:
    """The part of a step that runs once, after all forwards: a stage of the model, and the loss.

    `stage` is the last one, which is in no order of actions; None where only the loss needs the whole batch. `joins`
    maps each value that may be read, by port, to the kind it is joined by; a number that counts samples is a sum.
    """

    stage: int | None
    joins: Mapping[str, JoinKind]


def join_parts(kind: JoinKind, parts: Sequence[Any]) -> Any:
    """Return the whole of the values of micro-batches: tensors, or numbers."""
    if isinstance(kind, Replicate) or len(parts) == 1:
        return parts[0]
    if isinstance(kind, Shard):
        return kind.join(parts)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def split_gradient(kind: JoinKind, gradient: torch.Tensor | None, sizes: Sequence[int]) -> list[torch.Tensor | None]:
    """Return the gradients of the parts, from that of the whole.

    Every micro-batch made a replicated value, and the tail read the first: only that one receives the gradient.
    """
    if gradient is None or isinstance(kind, Partial):
        return [gradient] * len(sizes)
    if isinstance(kind, Replicate):
        return [gradient, *[None] * (len(sizes) - 1)]
    total, start, parts = sum(sizes), 0, []
    for size in sizes:
        parts.append(kind.take(gradient, start, size, total))
        start += size
    return list(parts)


PARTS = ("parts",)  # not joined


def combine_parts(parts: Sequence[torch.Tensor], how: tuple[Any, ...]) -> torch.Tensor:
    """Return all parts as one: ("join", kind), ("sum",), ("sum", weights) or ("first",)."""
    if how[0] == "join" and len(parts) > 1:
        whole: torch.Tensor = how[1].join(parts)
        return whole
    if how[0] == "sum" and len(how) > 1:
        parts = [weigh(part, weight) for part, weight in zip(parts, how[1], strict=True)]
    total = parts[0]
    for part in parts[1:] if how[0] == "sum" else ():
        total = total + part
    return total
