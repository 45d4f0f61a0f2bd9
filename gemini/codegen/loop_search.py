"""Loop search: find neighbouring parts of a stage that are iterations of one loop, and build the loop.

A part is a layer `prefix.index` with the glue code that follows it, several such layers, or one call of a module that
is called repeatedly. Parts are equal if they are the same steps with the same arguments, where a reference into the
part itself has the same position, and one into the previous part becomes a value carried between iterations:

    part 6   q = query(h)    a = attend(q, mask)   o = out(a, h)         h: value from before the loop
    part 7   q = query(o₆)   a = attend(q, mask)   o = out(a, o₆)        o₆: carried, mask: the same in all
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from gemini.codegen.attribute_paths import Paths
from gemini.codegen.out_checks import needs_output_check
from gemini.codegen.stage_modules import HELD, join
from gemini.codegen.stage_statements import ANYWHERE, Carried, Collected, Loop
from gemini.codegen.stage_steps import StageStep, read_refs
from gemini.ir.graph import Graph
from gemini.ir.node import MODULES
from gemini.ir.pytree import ModelObject, Path, Ref

_FIRST_PSEUDO = 1_000_000_000
_SAVED, _SIZE = 3, 4
Key = tuple[str, int]
Place = tuple[int, str, Path]  # a step of a part, and the value of it


@dataclass
class LoopTurnSteps:
    """The steps of one iteration: of `width` layers from `key` on, or of no particular layer, with index ANYWHERE."""

    key: Key
    steps: list[StageStep]
    width: int = 1

    def __post_init__(self) -> None:
        self.places = {step.node.id: at for at, step in enumerate(self.steps) if step.node is not None}
        prefix, index = self.key
        count = 0 if index == ANYWHERE else self.width
        self.paths = tuple(join(prefix, str(index + at)) for at in range(count))

    def place(self, ref: Ref) -> Place | None:
        """Return where in the part a value is made."""
        return (self.places[ref.node], ref.source, ref.path) if ref.node in self.places else None

    def layer(self, target: str) -> int | None:
        """Return which of its layers a target belongs to."""
        for at, path in enumerate(self.paths):
            if target == path or target.startswith((f"{path}.", f"{path}[")):
                return at
        return None


class LoopFinder:
    """Finds equal parts of a stage and rolls them into loops."""

    def __init__(
        self, graph: Graph, paths: Paths, steps: list[StageStep], leaving: list[Ref], apart: Collection[int] = ()
    ) -> None:
        self.graph, self.paths, self.apart = graph, paths, apart
        self.leaving: dict[int, list[Ref]] = {}
        for ref in leaving:
            self.leaving.setdefault(ref.node, []).append(ref)
        self.readers: dict[int, list[tuple[StageStep, Ref]]] = {}
        for step in steps:
            for ref in read_refs(step):
                self.readers.setdefault(ref.node, []).append((step, ref))
        self.renamed: dict[int, int] = {}
        self.turns: dict[Ref, Ref] = {}
        self.pseudo = _FIRST_PSEUDO
        self._shapes: dict[tuple[int, Key, int], str] = {}

    @staticmethod
    def is_worth_it(units: list[LoopTurnSteps]) -> bool:
        """Return whether a loop is shorter to read than its iterations."""
        size = len(units[0].steps)
        return (len(units) - 1) * size >= _SAVED and (len(units) > 2 or size >= _SIZE)

    # ── equal parts ──────────────────────────────────────────────────────────────────────────────────────────────────
    def find_run(self, units: Iterable[LoopTurnSteps]) -> tuple[list[LoopTurnSteps], dict[Place, Ref]]:
        """Return the iterations of a loop that begins with the first part, and the start values of its carried ones.

        These are the equal parts from the first on, as far as a loop can cover them. Parts after them are not read.
        """
        starts: dict[Place, Ref] = {}
        run: list[LoopTurnSteps] = []
        for unit in units:
            if run and not self._match(run[-2] if len(run) > 1 else None, run[-1], unit, starts):
                break
            run.append(unit)
        return run[: self._until_used(run)], starts

    def _match(
        self, before: LoopTurnSteps | None, one: LoopTurnSteps, other: LoopTurnSteps, starts: dict[Place, Ref]
    ) -> bool:
        """Return whether a part equals the previous one; the first iteration (nothing before) sets the starts."""
        if len(one.steps) != len(other.steps):
            return False
        found = dict(starts)
        for left, right in zip(one.steps, other.steps, strict=True):
            if self.shape(left, one) != self.shape(right, other) or _share_checkpoint(left, right):
                return False
            for a, b in zip(read_refs(left), read_refs(right), strict=True):
                carried = one.place(b)
                if carried is not None:
                    if before is None and one.place(a) is None:
                        if found.setdefault(carried, a) != a:
                            return False
                        continue
                    if before is None or before.place(a) != carried:
                        return False
                elif one.place(a) != other.place(b) or (one.place(a) is None and not self._same(a, one, b, other)):
                    return False
        if before is not None and found.keys() != starts.keys():
            return False
        starts.update(found)
        return True

    def _same(self, a: Ref, one: LoopTurnSteps, b: Ref, other: LoopTurnSteps) -> bool:
        """Return whether two outer values are one, or the same tensor of two layers."""
        if a == b:
            return True
        left, right = self.graph.nodes[a.node], self.graph.nodes[b.node]
        if left.kind not in HELD or left.kind != right.kind:
            return False
        return self._access_text(left.target, one, self.paths.tensor) == self._access_text(
            right.target, other, self.paths.tensor
        )

    def shape(self, step: StageStep, unit: LoopTurnSteps) -> str:
        """Return a step without the parts that may differ between layers."""
        key = (id(step), unit.key, unit.width)
        if key not in self._shapes:
            self._shapes[key] = self._shape(step, unit)
        return self._shapes[key]

    def _shape(self, step: StageStep, unit: LoopTurnSteps) -> str:

        def blank(form: Any) -> Any:
            if isinstance(form, Ref):
                return Ref(0)
            if isinstance(form, ModelObject):
                return ModelObject(self._access_text(form.module, unit, self.paths.module), form.attribute)
            return form

        plain = step.with_refs(blank)
        if plain.guard is not None:
            return repr((plain.guard.expr, plain.guard.expected))
        node = step.node
        if node is None or plain.node is None:
            return f"a number for another stage: {id(step)}"
        if node.id in self.apart:
            return f"a node like no other: {node.id}"
        target = self._access_text(node.target, unit, self.paths.module) if node.kind in MODULES else node.target
        facts = (
            node.kind,
            target,
            plain.node.args,
            plain.node.kwargs,
            node.region,
            node.checkpoint,
            node.recomputed > 0,
        )
        made = [(source, path) for source, path in node.outputs if source != "inner"]
        inner = len(node.outputs) - len(made)
        return repr((*facts, node.out_spec, made, inner, len(node.mutates), needs_output_check(self.graph, node)))

    def _access_text(self, target: str, unit: LoopTurnSteps, text: Callable[[str], str]) -> str:
        """Return the access path of a target from the layer that contains it.

        A stage may hold one layer entirely and another in part, with different paths (`parts[0]`, `parts["0"]`).
        """
        at = unit.layer(target)
        if at is None:
            return target
        path = unit.paths[at]
        return f"·{at}" if target == path else f"·{at} {text(target).removeprefix(self.paths.module(path))}"

    # ── values used outside ───────────────────────────────────────────────────────────────────────────────────
    def _find_used_outside(self, units: list[LoopTurnSteps]) -> dict[Place, set[int]]:
        """Return the values that code outside the loop reads, with the parts that make them."""
        inside = {id(step) for unit in units for step in unit.steps}
        found: dict[Place, set[int]] = {}
        for at, unit in enumerate(units):
            for node in unit.places:
                used = [ref for step, ref in self.readers.get(node, ()) if id(step) not in inside]
                for ref in (*used, *self.leaving.get(node, ())):
                    place = unit.place(ref)
                    if place is not None:
                        found.setdefault(place, set()).add(at)
        return found

    def _until_used(self, units: list[LoopTurnSteps]) -> int:
        """Count the parts that a loop can cover: up to the first whose values are needed afterwards, unless all are."""
        count = len(units)
        while count > 1:
            used = self._find_used_outside(units[:count])
            early = [min(turns) for turns in used.values() if len(turns) < count and min(turns) < count - 1]
            if not early:
                break
            count = min(early) + 1
        return count

    # ── a loop ─────────────────────────────────────────────────────────────────────────────────────────────────
    def loop(self, units: list[LoopTurnSteps], starts: dict[Place, Ref]) -> Loop:
        """Return the loop of equal parts; `starts` are the carried values at its start."""
        first, template = units[0], units[1]
        carried: dict[Place, Carried] = {}
        for place, start in starts.items():
            carried[place] = Carried(self._new(), start, self._ref(template, place))
        self.renamed |= {node: self._id(template, place) for node, place in units[-1].places.items()}
        collected = []
        for place, turns in self._find_used_outside(units).items():
            if turns != {len(units) - 1}:
                places = {self._ref(unit, place): self._new() for unit in units}
                self.turns |= places
                collected.append(Collected(self._ref(template, place), tuple(places.values())))

        def inner(form: Any) -> Any:
            place = first.place(form) if isinstance(form, Ref) else None
            return form if place is None else carried[place].inside

        steps = [step.with_refs(inner) for step in template.steps]
        indices = tuple(unit.key[1] for unit in units)
        return Loop(first.key[0], indices, template.key[1], steps, first.width, list(carried.values()), collected)

    def _new(self) -> Ref:
        """Return a reference to a value that no node of the graph makes."""
        self.pseudo += 1
        return Ref(self.pseudo)

    @staticmethod
    def _id(unit: LoopTurnSteps, at: int) -> int:
        node = unit.steps[at].node
        assert node is not None
        return node.id

    def _ref(self, unit: LoopTurnSteps, place: Place) -> Ref:
        return Ref(self._id(unit, place[0]), place[1], place[2])


def _share_checkpoint(one: StageStep, other: StageStep) -> bool:
    """Return whether two steps are in one activation checkpoint, which a loop would cut into one per iteration."""
    return one.node is not None and other.node is not None and 0 < one.node.recomputed == other.node.recomputed
