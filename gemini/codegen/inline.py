"""Inlining: a step whose result is read once, right after, becomes part of the statement that reads it.

Steps run in the order of capture, and so does the text: operands are evaluated from left to right. A pending step may
only be inlined if nothing that ran after it would then run before it:

    pending   query   view        transpose reads view, which is on top     →  query(x).view(…).transpose(1, 2)
    pending   a       b           f reads (b, a)                            →  a gets a variable, f(b, a_value)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from gemini.codegen.op_text import returns_first
from gemini.codegen.stage_statements import StageStatement
from gemini.codegen.stage_steps import StageStep, read_refs
from gemini.codegen.value_names import Namer
from gemini.ir.pytree import BackReference, Ref, leaves

_WIDEST = 108


@dataclass(frozen=True)
class _Pending:
    """A step whose value waits for its reader, with the steps inlined into it."""

    value: Ref
    step: StageStep
    inner: tuple[_Pending, ...] = ()

    @property
    def steps(self) -> tuple[StageStep, ...]:
        return (*(step for part in self.inner for step in part.steps), self.step)


_NONE = Ref(-1)


class Folding:
    """Makes statements of steps. `uses` counts the reads of every value; `lengths` are the texts of single steps."""

    def __init__(self, namer: Namer, uses: Counter[Ref], kept: Collection[Ref], lengths: dict[int, int]) -> None:
        self.namer, self.uses, self.kept, self.lengths = namer, uses, set(kept), lengths
        self.width = _WIDEST
        self.by_node: dict[int, list[Ref]] = {}
        for ref in dict.fromkeys([*uses, *kept]):
            self.by_node.setdefault(ref.node, []).append(ref)

    def fold(self, steps: Iterable[StageStep], indent: int = 0) -> list[StageStatement]:
        """Return the statements of a straight run of steps."""
        self.width = _WIDEST - indent
        done: list[StageStatement] = []
        pending: list[_Pending] = []  # values without a variable yet, in order of evaluation
        for step in steps:
            taken = self._count_taken(step, pending)
            if not taken and self._fits_opened(step, pending):  # too long as a whole: name the inner part
                done += [StageStatement(part.steps) for part in (*pending[:-1], *pending[-1].inner)]
                pending, taken = [_Pending(pending[-1].value, pending[-1].step)], 1
            kept, inner = pending[: len(pending) - taken], pending[len(pending) - taken :]
            value = self._foldable(step)
            entry = _Pending(value or _NONE, step, tuple(inner))
            if value is not None and self._length(entry.steps) < self.width:
                pending = [*kept, entry]
                continue
            done += [StageStatement(part.steps) for part in (*kept, entry)]
            pending = []
        return [*done, *(StageStatement(part.steps) for part in pending)]

    def _count_taken(self, step: StageStep, pending: list[_Pending]) -> int:
        """Count the latest pending values that a step inlines, in their order."""
        waiting = [part.value for part in pending]
        read = [ref for ref in self._evaluation_order(step) if ref in waiting]
        count = 0
        while count < min(len(read), len(waiting)) and read[-1 - count] == waiting[-1 - count]:
            count += 1
        while count:
            entry = _Pending(_NONE, step, tuple(pending[len(pending) - count :]))
            if self._length(entry.steps) < self._room(step) and all(
                self._reads_well(part.step, step) for part in entry.inner
            ):
                break
            count -= 1
        return count

    def _fits_opened(self, step: StageStep, pending: list[_Pending]) -> bool:
        """Return whether a step can inline the latest pending value if the contents of that get a variable."""
        if not pending or not pending[-1].inner:
            return False
        last = _Pending(pending[-1].value, pending[-1].step)
        return self._count_taken(step, [last]) == 1

    def _evaluation_order(self, step: StageStep) -> list[Ref]:
        """Return the tensors a step reads in Python's evaluation order; none where that differs."""
        node, found = step.node, list(step.tensors())
        if node is None or (node.wrapped and getattr(node.kwargs, "items", None)) or self._is_hoisted(step):
            return []
        value: Any = getattr(node.args, "items", None) or ()
        if node.target == "torch.Tensor.__setitem__" and found and value[-1] == found[-1]:
            return [found[-1], *found[:-1]]
        return found

    def _is_hoisted(self, step: StageStep) -> bool:
        """Return whether containers among its arguments get variables, and so are evaluated first."""
        if any(isinstance(leaf, BackReference) for form in step.forms for leaf in leaves(form)):
            return True
        return step.node is not None and any(ref.source == "arg" for ref in self.by_node.get(step.node.id, ()))

    def _foldable(self, step: StageStep) -> Ref | None:
        """Return the single value of a step, if it is read once and may be inlined into its reader."""
        node = step.node
        if node is None or node.mutates or (node.kind == "op" and returns_first(node.target)):
            return None
        values = self.by_node.get(node.id, [])
        if len(values) != 1 or values[0].source != "ret" or self.uses[values[0]] != 1 or values[0] in self.kept:
            return None
        return None if self._is_hoisted(step) else values[0]

    def _reads_well(self, inner: StageStep, outer: StageStep) -> bool:
        """Return whether the model's code nests the two, or at least has no name for the inner one."""
        one, other = inner.node, outer.node
        if one is None or other is None or (one.region, one.recomputed) != (other.region, other.recomputed):
            return False
        statement = self.namer.statement(one)
        if statement is not None and statement is self.namer.statement(other):
            return True
        return not self.namer.assigned_name(one, self.by_node[one.id][0].path)

    def _room(self, step: StageStep) -> int:
        """Return how long the text of a step may be, beside the name that is set."""
        values = self.by_node.get(step.node.id, []) if step.node is not None else []
        return self.width - sum(len(self.namer.of(value)) + 3 for value in values)

    def _length(self, steps: tuple[StageStep, ...]) -> int:
        """Return the approximate length of the text of inlined steps."""
        total = 2 * (len(steps) - 1)
        for step in steps:
            total += self.lengths.get(step.node.id, 0) if step.node is not None else 0
            if step is not steps[-1] and step.node is not None:
                total -= len(self.namer.of(self.by_node[step.node.id][0]))
        return total


def count_uses(steps: Iterable[StageStep]) -> Counter[Ref]:
    """Count how often every value is read, as a tensor or as a number."""
    return Counter(ref for step in steps for ref in read_refs(step))
