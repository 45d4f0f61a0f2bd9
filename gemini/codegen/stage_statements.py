"""Stage statements: statements and loops of a stage, each with the variables it reads and sets.

A statement is one step, with the steps inlined into it. A loop is a repeated layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gemini.codegen.stage_modules import join
from gemini.codegen.stage_steps import StageStep
from gemini.ir.pytree import Path, Ref

ANYWHERE = -1  # the index if there is no particular layer


@dataclass(eq=False)
class Variable:
    """A local variable: its preferred name, its name, and when its contents are needed."""

    wanted: str
    fixed: bool = False  # a parameter of forward, whose name is known
    number: bool = False  # holds no tensor
    name: str = ""
    spans: list[list[int]] = field(default_factory=list)  # [set, last read] for every time it is set
    merged: Variable | None = None  # the variable it was merged into

    @property
    def root(self) -> Variable:
        """The variable that it was merged into."""
        return self if self.merged is None else self.merged.root

    @property
    def end(self) -> int:
        """When it is last needed."""
        return max(end for _, end in self.spans)


@dataclass(eq=False)
class StageStatement:
    """Steps written as one statement; the last is the outermost."""

    steps: tuple[StageStep, ...]
    position: int = 0

    @property
    def main(self) -> StageStep:
        """The outermost step."""
        return self.steps[-1]


@dataclass(frozen=True)
class Carried:
    """A value carried from one iteration of a loop to the next."""

    inside: Ref  # its reference in the body
    start: Ref  # its value in the first iteration
    made: Ref  # the value for the next iteration


@dataclass(frozen=True)
class Collected:
    """A value of every iteration that is needed after the loop."""

    made: Ref
    turns: tuple[Ref, ...]  # references in code after the loop


@dataclass(eq=False)
class Loop:
    """Equal layers: `prefix.first`, `prefix.first + 1` …, `width` per iteration; or a module called repeatedly."""

    prefix: str
    indices: tuple[int, ...]  # of the first layer of each iteration; ANYWHERE: every iteration has the same modules
    template: int  # the index whose steps are the body
    steps: list[StageStep]
    width: int = 1
    carried: list[Carried] = field(default_factory=list)
    collected: list[Collected] = field(default_factory=list)
    body: list[StageStatement] = field(default_factory=list)
    start: int = 0
    end: int = 0

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers whose steps are the body."""
        count = 0 if self.template == ANYWHERE else self.width
        return tuple(join(self.prefix, str(self.template + at)) for at in range(count))


Item = StageStatement | Loop


@dataclass(eq=False)
class Target:
    """The variables that receive a node's result."""

    whole: Variable | None = None  # the result, or the part of it at `path`
    path: Path = ()
    pattern: list[object] | None = None  # variables to unpack it into, nested; None for unread parts
    sides: list[tuple[Variable, Ref]] = field(default_factory=list)  # results by side effect
    hoisted: list[tuple[int, int, Variable]] = field(default_factory=list)  # (args or kwargs, label, variable)


def statements(items: list[Item]) -> Iterator[StageStatement]:
    """Yield all statements, those inside loops included."""
    for item in items:
        if isinstance(item, Loop):
            yield from item.body
        else:
            yield item
