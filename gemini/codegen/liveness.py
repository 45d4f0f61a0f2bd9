"""Liveness: when every variable is needed, its name, and when its contents can be dropped.

A name is reused once its contents are dead, as in handwritten code: `x = self.fc(x)`. Positions count statements; a
statement reads before it sets.
"""

from __future__ import annotations

from gemini.codegen.name_spans import NameAllocator, NameSpans
from gemini.codegen.stage_statements import Item, Loop, StageStatement, Variable
from gemini.codegen.variables import Bindings
from gemini.ir.pytree import Ref

STRIDE = 4  # positions per statement: preparation, the statement, reads from its result


class Liveness:
    """Live ranges and names of all variables of a program."""

    def __init__(self, items: list[Item], bindings: Bindings, reserved: set[str]) -> None:
        self.bindings, self.reserved = bindings, reserved
        self.variables: dict[Variable, None] = {}
        for variable, _ in bindings.places.values():
            if variable.fixed:
                self._add_set(variable, -1)
        for variable in bindings.numbers.values():
            if variable.fixed:
                self._add_set(variable, -1)
        self.last = self._walk(items)
        for value in bindings.outputs:
            for variable in bindings.variables_of(value):
                self._add_read(variable, self.last)
        for loop in items:
            if isinstance(loop, Loop):
                self._merge(loop)
        self.lives = self._assign_names()

    # ── spans ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _add_set(self, variable: Variable, position: int) -> None:
        variable.spans.append([position, position])
        self.variables[variable] = None

    def _add_read(self, variable: Variable, position: int) -> None:
        variable.spans[-1][1] = max(variable.spans[-1][1], position)

    def _walk(self, items: list[Item]) -> int:
        position = STRIDE
        for item in items:
            if isinstance(item, StageStatement):
                self._statement(item, position)
                position += STRIDE
                continue
            position = self._loop(item, position)
        return position

    def _statement(self, statement: StageStatement, position: int) -> None:
        statement.position = position
        for step in statement.steps:
            for variable in self.bindings.variables_read(step):
                self._add_read(variable, position + 1)
            target = self.bindings.targets.get(step.node.id) if step.node is not None else None
            for _, _, variable in target.hoisted if target is not None else ():
                self._add_set(variable, position)
                self._add_read(variable, position + 1)
        for step in statement.steps:
            for variable in self.bindings.set_by(step):
                self._add_set(variable, position + 1)
            target = self.bindings.targets.get(step.node.id) if step.node is not None else None
            for variable, _ in target.sides if target is not None else ():
                self._add_set(variable, position + 2)

    def _loop(self, loop: Loop, position: int) -> int:
        loop.start = position
        for collected in loop.collected:
            self._add_set(self.bindings.list_of(collected), position)
        outside = dict(self.variables)
        for carried in loop.carried:
            for variable in self.bindings.variables_of(carried.start):
                self._add_read(variable, position)
            self._add_set(self.bindings.places[carried.inside][0], position + 1)
        position += STRIDE
        for statement in loop.body:
            self._statement(statement, position)
            position += STRIDE
            made = {step.node.id for step in statement.steps if step.node is not None}
            for collected in loop.collected:
                if collected.made.node in made:
                    for variable in self.bindings.variables_of(collected.made):
                        self._add_read(variable, statement.position + STRIDE - 1)
        loop.end = position
        for carried in loop.carried:  # the next iteration reads it
            for variable in self.bindings.variables_of(carried.made):
                self._add_read(variable, loop.end)
        for variable in outside:  # every iteration needs outer values that the body reads
            if variable.spans[-1][1] > loop.start:
                self._add_read(variable, loop.end)
        return position + STRIDE

    # ── loops ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _merge(self, loop: Loop) -> None:
        """Let a carried value, its start and its successor share a variable where their live ranges allow it."""
        for carried in loop.carried:
            inside, made = self.bindings.places[carried.inside][0], self.bindings.places.get(carried.made)
            if made is not None and not made[1] and inside.spans[-1][1] <= made[0].spans[-1][0]:
                self._unite(inside, made[0])
            else:
                inside.spans[-1][1] = max(inside.spans[-1][1], loop.end)
            start = self.bindings.places.get(carried.start)
            if start is not None and not start[1] and start[0].root.end <= loop.start:
                self._unite(start[0], inside)

    def _unite(self, first: Variable, other: Variable) -> None:
        first, other = first.root, other.root
        if first is other:
            return
        first.spans += other.spans
        other.merged = first
        if not first.fixed:
            first.wanted = other.wanted

    # ── names ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _assign_names(self) -> dict[str, NameSpans]:
        """Name all variables; return when the contents of every name are needed."""
        roots = [variable for variable in self.variables if variable.merged is None]
        names = NameAllocator(self.reserved)
        for variable in sorted(roots, key=lambda one: (not one.fixed, one.spans[0][0])):
            if variable.fixed:
                variable.name = variable.wanted
                names.add(variable.name, variable.spans)
            else:
                variable.name = names.assign(variable.wanted, variable.spans)
        for variable in self.variables:
            variable.name = variable.root.name
        return {name: blocked for name, blocked in names.spans.items() if blocked.spans}

    def numbers(self) -> set[str]:
        """Return the names that never hold a tensor."""
        tensors = {variable.name for variable in self.variables if not variable.number}
        return {variable.name for variable in self.variables} - tensors

    def name(self, value: Ref) -> str:
        """Return the name of the variable of a value."""
        return self.bindings.places[value][0].name
