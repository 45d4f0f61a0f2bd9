"""Shard options: what a plan must reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardOptions:
    """Requirements of a plan.

    The plan is the fastest of those that shard at least `share` of the parameter bytes, as far as the model admits it.
    `folds`: equivalent layers share their layouts.
    """

    share: float = 0.95
    folds: bool = True
