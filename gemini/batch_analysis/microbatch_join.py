"""The tail: the end of a step in which samples meet, run once on the whole batch.

    stage 0, 1 …     F0 F1 F2 F3                 B3 B2 B1 B0
    tail                          ▸ join ▸ run ▸ cut

Stages run by micro-batches. What the tail reads of them is put together in the order of the samples; it runs with the
loss, forward and backward, and the gradients of what it has read are cut into those of the micro-batches again. So
no micro-batch begins its backward before the last one is through all stages.
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
    """What runs once a step, after all forwards: a stage of the model, and the loss.

    `stage` is the last one, which is in no order of actions; None where only the loss sees the whole batch. `joins`
    says how each value that may be read is put together, by port; a number that counts samples is a sum.
    """

    stage: int | None
    joins: Mapping[str, JoinKind]


def join_parts(kind: JoinKind, parts: Sequence[Any]) -> Any:
    """The whole of what micro-batches made: tensors, or numbers."""
    if isinstance(kind, Replicate) or len(parts) == 1:
        return parts[0]
    if isinstance(kind, Shard):
        return kind.join(parts)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def split_gradient(kind: JoinKind, gradient: torch.Tensor | None, sizes: Sequence[int]) -> list[torch.Tensor | None]:
    """The gradients of the parts, from that of the whole.

    A constant was made by every micro-batch and read of the first: only that one is to go back from it.
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


PARTS = ("parts",)  # as they are


def combine_parts(parts: Sequence[torch.Tensor], how: tuple[Any, ...]) -> torch.Tensor:
    """All parts as one: ("join", kind), ("sum",), ("sum", weights) or ("first",)."""
    if how[0] == "join" and len(parts) > 1:
        whole: torch.Tensor = how[1].join(parts)
        return whole
    if how[0] == "sum" and len(how) > 1:
        parts = [weigh(part, weight) for part, weight in zip(parts, how[1], strict=True)]
    total = parts[0]
    for part in parts[1:] if how[0] == "sum" else ():
        total = total + part
    return total
