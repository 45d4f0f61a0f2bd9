"""Rolled calls: one module called repeatedly, with its glue code, rolled into `for _ in range(n)`.

    query key value attend dense ffn norm │ query key value attend dense ffn norm │ query …

Steps of a stage that recur after a period (`gemini.ir.repeats`) are iterations of a loop, if they are equal in the same
sense as layers. A stage may begin or end in the middle of a call, so a loop may begin anywhere in the first period; it
is aligned with the model's first call, if possible:

    steps       dense ffn norm query key value attend dense ffn norm query key value attend dense ffn
    span        ├──────────────────────────────────────────────────────────────────────────────────┤
    begins      │      first period        │
    iterations                 ├────────────────────────────────┤├─ incomplete
"""

from __future__ import annotations

from collections.abc import Iterator

from gemini.codegen.loop_search import LoopFinder, LoopTurnSteps, Place
from gemini.codegen.stage_statements import ANYWHERE, Loop
from gemini.codegen.stage_steps import StageStep
from gemini.ir.node import MODULES
from gemini.ir.pytree import Ref
from gemini.ir.repeats import Repeats, Span

_NOWHERE = ("", ANYWHERE)
_Found = tuple[int, list[LoopTurnSteps], dict[Place, Ref]]  # a loop: its first step, its iterations, its start values


def roll_repeats(alike: LoopFinder, items: list[StageStep | Loop]) -> list[StageStep | Loop]:
    """Return the items with repeated calls in runs of steps rolled; loops stay."""
    first_calls: dict[str, int] = {}
    for node in alike.graph.nodes:
        if node.kind in MODULES:
            first_calls.setdefault(node.target, node.id)
    done: list[StageStep | Loop] = []
    run: list[StageStep] = []
    for item in items:
        if isinstance(item, StageStep):
            run.append(item)
            continue
        done += [*_StepRun(alike, run, first_calls).roll(), item]
        run = []
    return [*done, *_StepRun(alike, run, first_calls).roll()]


class _StepRun:
    """Consecutive steps."""

    def __init__(self, alike: LoopFinder, steps: list[StageStep], first_calls: dict[str, int]) -> None:
        self.alike, self.steps, self.first_calls = alike, steps, first_calls
        self.modules = [_module(step) for step in steps]
        called = [module for module in self.modules if module]
        self.is_repeated = len(set(called)) < len(called)
        anywhere = LoopTurnSteps(_NOWHERE, [])
        self.repeats = Repeats((_scope(step), alike.shape(step, anywhere)) for step in steps if self.is_repeated)

    def roll(self) -> list[StageStep | Loop]:
        """Return the steps, with loops in place of repeated ones."""
        done: list[StageStep | Loop] = []
        at = seen = 0  # steps written; steps inspected
        while self.is_repeated and seen < len(self.steps):
            found = self._find_loop(seen, at)
            if found is None:
                seen += 1
                continue
            start, units, starts = found
            done += [*self.steps[at:start], self.alike.loop(units, starts)]
            at = seen = start + len(units) * len(units[0].steps)
        return [*done, *self.steps[at:]]

    def _find_loop(self, marker: int, lowest: int) -> _Found | None:
        """Return the best loop that repeats the module called at a step; it begins at `lowest` or later."""
        if not self.modules[marker]:
            return None
        for span in self.repeats.spans(marker, lowest):
            begins = range(span.start, min(span.start + span.period, span.end - 2 * span.period + 1))
            aligned = self._find_aligned(span)
            found = self._find_longest(span, [at for at in begins if at in aligned])
            found = found or self._find_longest(span, [at for at in begins if at not in aligned])
            if found is not None:
                return found
        return None

    def _find_longest(self, span: Span, begins: list[int]) -> _Found | None:
        """Return the loop with most iterations that begins at one of some steps; None if none is worthwhile."""
        best: _Found | None = None
        for begin in begins:
            units, starts = self.alike.find_run(self._turns(begin, span))
            if len(units) > (1 if best is None else len(best[1])) and self.alike.is_worth_it(units):
                best = begin, units, starts
        return best

    def _turns(self, begin: int, span: Span) -> Iterator[LoopTurnSteps]:
        """Yield the iterations in a span, if the first begins at a step."""
        for at in range(begin, span.end - span.period + 1, span.period):
            yield LoopTurnSteps(_NOWHERE, self.steps[at : at + span.period])

    def _find_aligned(self, span: Span) -> set[int]:
        """Return from which steps on the first module called is the one that the model calls first of these."""
        called = [module for module in self.modules[span.start : span.start + span.period] if module]
        first = min(called, key=self.first_calls.__getitem__)
        found, following = set(), ""
        for at in range(min(span.start + 2 * span.period, span.end) - 1, span.start - 1, -1):
            following = self.modules[at] or following
            if following == first:
                found.add(at)
        return found


def _module(step: StageStep) -> str:
    """Return the module that a step calls, or None."""
    return step.node.target if step.node is not None and step.node.kind in MODULES else ""


def _scope(step: StageStep) -> str:
    """Return the scope of a step in the model: the end of one module is not the end of another."""
    if step.node is not None:
        return step.node.scope[-1] if step.node.scope else ""
    return step.guard.scope[-1] if step.guard is not None and step.guard.scope else ""
