"""Shard options: what a plan must reach, and what the user decides."""

from __future__ import annotations

from dataclasses import dataclass

from gemini.errors import ShardingError

REDUCTION, OUTPUT = 0, -1
REPLICATED, SHARDED = "replicate", "shard"
CHOICES: dict[str, str | int] = {
    REPLICATED: REPLICATED, SHARDED: SHARDED, "0": REDUCTION, "-1": OUTPUT,
}  # fmt: skip


@dataclass(frozen=True)
class ScopeOverride:
    """A choice for a scope: a module or parameter by name, `*` for a part between dots.

    `replicate` excludes the scope from sharding, `shard` demands it of the weights, and 0 and -1 divide the reduction
    or the output dimension of its weights.
    """

    scope: str
    choice: str | int

    def __post_init__(self) -> None:
        if type(self.choice) is bool or self.choice not in CHOICES.values():
            raise ShardingError(
                f"{self.choice!r} is no choice for {self.scope!r}\n    → write one of {', '.join(CHOICES)}"
            )

    @staticmethod
    def read(text: str) -> ScopeOverride:
        """Read `scope=choice`."""
        scope, equals, choice = text.rpartition("=")
        if not equals or not scope or choice.strip() not in CHOICES:
            raise ShardingError(
                f"{text!r} is no override\n    → write a scope and one of {', '.join(CHOICES)}: lm_head=replicate"
            )
        return ScopeOverride(scope.strip(), CHOICES[choice.strip()])


class UnknownScopeError(ShardingError):
    """An override names a scope that the model does not have."""


def read_overrides(text: str) -> tuple[ScopeOverride, ...]:
    """Read `scope=choice,scope=choice`."""
    return tuple(ScopeOverride.read(part) for part in text.split(",") if part)


@dataclass(frozen=True)
class ShardOptions:
    """Requirements of a plan.

    The plan is the fastest of those that shard at least `share` of the parameter bytes, as far as the model admits it.
    `folds`: equivalent layers share their layouts. `dim`: 0 divides the reduction dimension of all weights, -1 their
    output dimension. `overrides` hold for their scopes; the most specific one wins. `memory_mb` is a hard limit of what
    a shard holds of weights, gradients and the states of an optimizer with `optimizer_copies` per weight.
    """

    share: float = 0.95
    folds: bool = True
    dim: int | None = None
    overrides: tuple[ScopeOverride, ...] = ()
    memory_mb: float | None = None
    optimizer_copies: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ShardingError(f"share = {self.share!r} is no share of the parameters\n    → give 0 to 1")
        if self.dim not in (None, REDUCTION, OUTPUT) or type(self.dim) is bool:
            raise ShardingError(f"sharding_dim = {self.dim!r}\n    → give 0 (reduction) or -1 (output)")
        if self.memory_mb is not None and not self.memory_mb > 0:
            raise ShardingError(f"a memory limit of {self.memory_mb!r} MB\n    → give more than 0")

    @property
    def copies(self) -> float:
        """Bytes that a shard holds per byte of a trained parameter: weight, gradient and states of the optimizer."""
        return 2.0 + self.optimizer_copies
