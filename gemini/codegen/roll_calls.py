"""Rolled calls: one module called repeatedly, with its glue code, rolled into `for _ in range(n)`.

    query key value attend dense ffn norm │ query key value attend dense ffn norm │ query …

Steps of a stage that recur after a period of p are iterations of a loop, if they are equal in the same sense as layers.
A stage may begin or end in the middle of a call; the iterations are aligned with the model's first call, if possible.
"""

from __future__ import annotations

from collections.abc import Iterator

from gemini.codegen.loop_search import LoopFinder, LoopTurnSteps, Place
from gemini.codegen.stage_statements import ANYWHERE, Loop
from gemini.codegen.stage_steps import StageStep
from gemini.ir.node import MODULES
from gemini.ir.pytree import Ref

_NOWHERE = ("", ANYWHERE)


def roll_repeats(alike: LoopFinder, items: list[StageStep | Loop]) -> list[StageStep | Loop]:
    """Return the items with repeated calls in runs of steps rolled; loops stay."""
    done: list[StageStep | Loop] = []
    run: list[StageStep] = []
    for item in items:
        if isinstance(item, StageStep):
            run.append(item)
            continue
        done += [*_StepRun(alike, run).roll(), item]
        run = []
    return [*done, *_StepRun(alike, run).roll()]


class _StepRun:
    """Consecutive steps."""

    def __init__(self, alike: LoopFinder, steps: list[StageStep]) -> None:
        self.alike, self.steps = alike, steps
        self.modules = [_module(step) for step in steps]
        called = [module for module in self.modules if module]
        repeated = len(set(called)) < len(called)
        anywhere = LoopTurnSteps(_NOWHERE, [])
        self.shapes = [(_scope(step), alike.shape(step, anywhere)) for step in steps] if repeated else []

    def roll(self) -> list[StageStep | Loop]:
        """Return the steps, with loops in place of repeated ones."""
        done: list[StageStep | Loop] = []
        at = seen = 0  # steps written; steps inspected
        while self.shapes and seen < len(self.steps):
            found = self._loop_at(seen, at)
            if found is None:
                seen += 1
                continue
            start, units, loop = found
            done += [*self.steps[at:start], loop]
            at = seen = start + len(units) * len(units[0].steps)
        return [*done, *self.steps[at:]]

    def _loop_at(self, marker: int, lowest: int) -> tuple[int, list[LoopTurnSteps], Loop] | None:
        """Return the best loop that repeats the module called at a step; it begins at `lowest` or later."""
        if not self.modules[marker]:
            return None
        for period in self._periods(marker):
            start, end = self._span(marker, period, lowest)
            begins = range(start, min(start + period, end - 2 * period + 1))
            turns = [found for begin in begins if (found := self._turns(begin, end, period))]
            if turns:
                begin, units, starts = max(turns, key=lambda turn: (self._begins_a_call(turn[0], period), len(turn[1])))
                return begin, units, self.alike.loop(units, starts)
        return None

    def _turns(self, begin: int, end: int, period: int) -> tuple[int, list[LoopTurnSteps], dict[Place, Ref]] | None:
        """Return the iterations of a loop from one step to another, if it is worthwhile."""
        units = [LoopTurnSteps(_NOWHERE, self.steps[at : at + period]) for at in range(begin, end - period + 1, period)]
        count, starts = self.alike.count_equal(units)
        units = units[: self.alike.until_used(units[:count])]
        return (begin, units, starts) if len(units) > 1 and self.alike.is_worth_it(units) else None

    def _periods(self, marker: int) -> Iterator[int]:
        """Return after how many steps the same step recurs: the first few times."""
        later = [at for at in range(marker + 1, len(self.steps)) if self.shapes[at] == self.shapes[marker]]
        for at in later[:4]:
            if 2 * (at - marker) <= len(self.steps):
                yield at - marker

    def _span(self, marker: int, period: int, lowest: int) -> tuple[int, int]:
        """Return begin and end of the longest run around a step whose steps recur after a period."""
        start, end = marker, marker
        while start > lowest and self.shapes[start - 1] == self.shapes[start - 1 + period]:
            start -= 1
        while end + period < len(self.shapes) and self.shapes[end] == self.shapes[end + period]:
            end += 1
        return start, end + period

    def _begins_a_call(self, at: int, period: int) -> bool:
        """Return whether the first module called from a step on is the one that the model calls first of these."""
        turn = [module for module in self.modules[at : at + period] if module]
        if not turn:
            return False
        wanted = set(turn)
        first = next(node.target for node in self.alike.graph.nodes if node.kind in MODULES and node.target in wanted)
        return turn[0] == first


def _module(step: StageStep) -> str:
    """Return the module that a step calls, or None."""
    return step.node.target if step.node is not None and step.node.kind in MODULES else ""


def _scope(step: StageStep) -> str:
    """Return the scope of a step in the model: the end of one module is not the end of another."""
    if step.node is not None:
        return step.node.scope[-1] if step.node.scope else ""
    return step.guard.scope[-1] if step.guard is not None and step.guard.scope else ""
