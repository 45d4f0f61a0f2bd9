"""Rolled calls: one module called repeatedly, with its glue code, rolled into `for _ in range(n)`.

    query key value attend dense ffn norm │ query key value attend dense ffn norm │ query …

Steps of a stage that recur after a period of p are iterations of a loop, if they are equal in the same sense as layers.
A stage may begin or end in the middle of a call; the iterations are aligned with the model's first call, if possible.

The search compares numbers, one per distinct text of a step. The distances from a call to its next recurrences are the
candidates for p; the span of a candidate is where every step has the text of the step p later:

    step     0  1  2  3  4  5  6  7  8  9        candidates at step 1: 3, 6
    text     0  1  2  3  1  2  3  1  2  4
    p = 3       ├────────────span────────┤       text[i] == text[i + 3] for i in 1 … 5, so it ends before step 9

A span is the same for all calls in it: it is found once, and tried once. The loop begins in the first period of its
span, so the search takes time in proportion to the number of steps times the length of an iteration.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from gemini.codegen.loop_search import LoopFinder, LoopTurnSteps, Place
from gemini.codegen.stage_statements import ANYWHERE, Loop
from gemini.codegen.stage_steps import StageStep
from gemini.ir.node import MODULES
from gemini.ir.pytree import Ref

_NOWHERE = ("", ANYWHERE)
_RECURRENCES = 4  # that are candidates for the end of an iteration


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


@dataclass(frozen=True)
class _Span:
    """Steps in a row that recur after a period; `end` is after the last recurrence."""

    start: int
    end: int
    period: int

    def begins(self) -> range:
        """Return where a loop of two iterations or more may begin."""
        return range(self.start, min(self.start + self.period, self.end - 2 * self.period + 1))


class _StepRun:
    """Consecutive steps."""

    def __init__(self, alike: LoopFinder, steps: list[StageStep], first_calls: dict[str, int]) -> None:
        self.alike, self.steps, self.first_calls = alike, steps, first_calls
        self.modules = [_module(step) for step in steps]
        called = [module for module in self.modules if module]
        self.is_repeated = len(set(called)) < len(called)
        self.texts: list[int] = []  # a number per step, equal for equal texts
        self.places: list[list[int]] = []  # of a text: the steps that have it
        self.spans: dict[int, _Span] = {}  # the latest one of every period, for the next step that is not written yet
        if self.is_repeated:
            self._number_texts()

    def _number_texts(self) -> None:
        anywhere = LoopTurnSteps(_NOWHERE, [])
        numbers: dict[tuple[str, str], int] = {}
        for at, step in enumerate(self.steps):
            number = numbers.setdefault((_scope(step), self.alike.shape(step, anywhere)), len(numbers))
            if number == len(self.places):
                self.places.append([])
            self.places[number].append(at)
            self.texts.append(number)

    def roll(self) -> list[StageStep | Loop]:
        """Return the steps, with loops in place of repeated ones."""
        done: list[StageStep | Loop] = []
        at = seen = 0  # steps written; steps inspected
        while self.is_repeated and seen < len(self.steps):
            found = self._loop_at(seen, at)
            if found is None:
                seen += 1
                continue
            start, units, loop = found
            done += [*self.steps[at:start], loop]
            at = seen = start + len(units) * len(units[0].steps)
            self.spans = {}
        return [*done, *self.steps[at:]]

    def _loop_at(self, marker: int, lowest: int) -> tuple[int, list[LoopTurnSteps], Loop] | None:
        """Return the best loop that repeats the module called at a step; it begins at `lowest` or later."""
        if not self.modules[marker]:
            return None
        for period in self._periods(marker):
            known = self.spans.get(period)
            if known is not None and marker < known.end - period:
                continue  # tried at an earlier step
            span = self.spans[period] = self._span(marker, period, lowest)
            aligned = self._aligned(span)
            found = self._longest(span, [begin for begin in span.begins() if begin in aligned])
            found = found or self._longest(span, [begin for begin in span.begins() if begin not in aligned])
            if found is not None:
                begin, units, starts = found
                return begin, units, self.alike.loop(units, starts)
        return None

    def _longest(self, span: _Span, begins: list[int]) -> tuple[int, list[LoopTurnSteps], dict[Place, Ref]] | None:
        """Return the loop with most iterations that begins at one of some steps; None if none is worthwhile."""
        best: tuple[int, list[LoopTurnSteps], dict[Place, Ref]] | None = None
        for begin in begins:
            units, starts = self.alike.find_run(self._turns(begin, span))
            if len(units) > (1 if best is None else len(best[1])) and self.alike.is_worth_it(units):
                best = begin, units, starts
        return best

    def _turns(self, begin: int, span: _Span) -> Iterator[LoopTurnSteps]:
        """Yield the iterations in a span, if the first begins at a step."""
        for at in range(begin, span.end - span.period + 1, span.period):
            yield LoopTurnSteps(_NOWHERE, self.steps[at : at + span.period])

    def _periods(self, marker: int) -> Iterator[int]:
        """Yield after how many steps the same step recurs: the first few times."""
        places = self.places[self.texts[marker]]
        after = bisect_right(places, marker)
        for at in places[after : after + _RECURRENCES]:
            if 2 * (at - marker) <= len(self.steps):
                yield at - marker

    def _span(self, marker: int, period: int, lowest: int) -> _Span:
        """Return the longest span around a step that recurs after a period."""
        start, end, texts = marker, marker, self.texts
        while start > lowest and texts[start - 1] == texts[start - 1 + period]:
            start -= 1
        while end + period < len(texts) and texts[end] == texts[end + period]:
            end += 1
        return _Span(start, end + period, period)

    def _aligned(self, span: _Span) -> set[int]:
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
