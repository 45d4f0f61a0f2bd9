"""Loops: alike neighbouring layers of a stage, rolled into one `for`.

A *unit* is a layer `prefix.index` with the glue that follows it. Units are alike if they are the same steps with the
same arguments, where a reference into the unit itself keeps its place, and one into the unit before it becomes a value
carried from turn to turn:

    unit 6   q = query(h)    a = attend(q, mask)   o = out(a, h)         h: value from before the loop
    unit 7   q = query(o₆)   a = attend(q, mask)   o = out(a, o₆)        o₆: carried, mask: the same in all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemini.capture.forms import Owned, Path, Ref
from gemini.capture.graph import Graph
from gemini.capture.node import MODULES
from gemini.codegen.interface import Interface
from gemini.codegen.paths import Paths
from gemini.codegen.program import Carried, Collected, Loop
from gemini.codegen.skeleton import HELD, join
from gemini.codegen.steps import Step, read_refs
from gemini.codegen.watching import is_watched

_FIRST_PSEUDO = 1_000_000_000
Key = tuple[str, int]
Place = tuple[int, str, Path]  # the step of a unit, and the value of it


@dataclass
class Unit:
    """A layer's steps."""

    key: Key
    steps: list[Step]

    def __post_init__(self) -> None:
        self.places = {step.node.id: at for at, step in enumerate(self.steps) if step.node is not None}
        self.path = join(self.key[0], str(self.key[1]))

    def place(self, ref: Ref) -> Place | None:
        """Where in the unit a value is made."""
        return (self.places[ref.node], ref.source, ref.path) if ref.node in self.places else None


@dataclass
class Rolled:
    """Steps and loops, with the values that code after a loop knows by another name."""

    items: list[Step | Loop]
    renamed: dict[int, int] = field(default_factory=dict)  # nodes of the last turn → nodes of the body
    turns: dict[Ref, Ref] = field(default_factory=dict)  # values of all turns → places in a list

    def outside(self, ref: Any) -> Any:
        """A reference as code outside of the loop makes it that the value comes from."""
        if not isinstance(ref, Ref):
            return ref
        if ref in self.turns:
            return self.turns[ref]
        return Ref(self.renamed[ref.node], ref.source, ref.path) if ref.node in self.renamed else ref

    def inside(self, loop: Loop) -> Callable[[Any], Any]:
        """References as the body of a loop makes them: its own values stay."""
        own = {step.node.id for step in loop.steps if step.node is not None}
        return lambda ref: ref if isinstance(ref, Ref) and ref.node in own else self.outside(ref)


def roll(graph: Graph, steps: list[Step], interface: Interface, paths: Paths) -> Rolled:
    """The steps of a stage with its alike layers rolled; `paths` says how the stage reaches what it holds."""
    roller = _Roller(graph, paths, steps, [port.value for port in interface.outputs if isinstance(port.value, Ref)])
    rolled = Rolled(roller.roll(steps, 0))
    rolled.renamed, rolled.turns = roller.renamed, roller.turns
    for at, item in enumerate(rolled.items):
        if isinstance(item, Step):
            rolled.items[at] = item.rewritten(rolled.outside)
            continue
        item.steps = [step.rewritten(rolled.inside(item)) for step in item.steps]
        item.carried = [Carried(one.inside, rolled.outside(one.start), one.made) for one in item.carried]
    return rolled


class _Roller:
    def __init__(self, graph: Graph, paths: Paths, steps: list[Step], leaving: list[Ref]) -> None:
        self.graph, self.paths = graph, paths
        self.leaving: dict[int, list[Ref]] = {}
        for ref in leaving:
            self.leaving.setdefault(ref.node, []).append(ref)
        self.readers: dict[int, list[tuple[Step, Ref]]] = {}
        for step in steps:
            for ref in read_refs(step):
                self.readers.setdefault(ref.node, []).append((step, ref))
        self.renamed: dict[int, int] = {}
        self.turns: dict[Ref, Ref] = {}
        self.pseudo = _FIRST_PSEUDO

    def roll(self, steps: list[Step], depth: int) -> list[Step | Loop]:
        """Roll layers that are numbered by the `depth`-th number in their names, then deeper ones."""
        segments = _segments(steps, depth)
        if not any(key is not None for key, _ in segments):
            return list(steps)
        done: list[Step | Loop] = []
        at = 0
        while at < len(segments):
            key, segment = segments[at]
            units, rest, after = _units(segments, at) if key is not None else ([], [], at)
            loops = self._loops(units)
            if not any(isinstance(item, Loop) for item in loops):
                done += self.roll(segment, depth + 1) if key is not None else segment
                at += 1
                continue
            for item in loops:
                done += [item] if isinstance(item, Loop) else self.roll(item.steps, depth + 1)
            if rest:
                segments[after - 1] = (None, rest)
                after -= 1
            at = after
        return done

    def _loops(self, units: list[Unit]) -> list[Loop | Unit]:
        """Units with runs of alike ones made loops."""
        found: list[Loop | Unit] = []
        at = 0
        while at < len(units):
            count, starts = self._alike(units[at:])
            count = self._until_used(units[at : at + count])
            run = units[at : at + count]
            if count * len(run[0].steps) - len(run[0].steps) < 3 or (count < 3 and len(run[0].steps) < 4):
                found.append(units[at])
                at += 1
                continue
            found.append(self._loop(run, starts))
            at += count
        return found

    # ── alike ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _alike(self, units: list[Unit]) -> tuple[int, dict[Place, Ref]]:
        """How many units from the first on are alike, and what the carried values are at the start."""
        starts: dict[Place, Ref] = {}
        count = 1
        while count < len(units):
            before = units[count - 2] if count > 1 else None
            if not self._match(before, units[count - 1], units[count], starts):
                break
            count += 1
        return count, starts

    def _match(self, before: Unit | None, one: Unit, other: Unit, starts: dict[Place, Ref]) -> bool:
        """Whether a unit is like the one before it; the first turn of a loop (nothing before) sets the starts."""
        if len(one.steps) != len(other.steps):
            return False
        found = dict(starts)
        for left, right in zip(one.steps, other.steps, strict=True):
            if self._shape(left, one) != self._shape(right, other):
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

    def _same(self, a: Ref, one: Unit, b: Ref, other: Unit) -> bool:
        """Whether two values from outside are one, or the same tensor of two layers."""
        if a == b:
            return True
        left, right = self.graph.nodes[a.node], self.graph.nodes[b.node]
        if left.kind not in HELD or left.kind != right.kind:
            return False
        return self._reached(left.target, one, self.paths.tensor) == self._reached(
            right.target, other, self.paths.tensor
        )

    def _shape(self, step: Step, unit: Unit) -> str:
        """A step without what may differ between layers."""

        def blank(form: Any) -> Any:
            if isinstance(form, Ref):
                return Ref(0)
            if isinstance(form, Owned):
                return Owned(self._reached(form.module, unit, self.paths.module), form.attribute)
            return form

        plain = step.rewritten(blank)
        if plain.guard is not None:
            return repr((plain.guard.expr, plain.guard.expected))
        node = step.node
        if node is None or plain.node is None:
            return f"a number for another stage: {id(step)}"
        target = self._reached(node.target, unit, self.paths.module) if node.kind in MODULES else node.target
        facts = (node.kind, target, plain.node.args, plain.node.kwargs, node.region, node.checkpoint)
        made = [(source, path) for source, path in node.outputs if source != "inner"]
        inner = len(node.outputs) - len(made)
        return repr((*facts, node.sketch, made, inner, len(node.mutates), is_watched(self.graph, node)))

    def _reached(self, target: str, unit: Unit, text: Callable[[str], str]) -> str:
        """How the code reaches something from a layer that it is part of: of one layer, the stage may hold all, of
        another some parts, and these are reached otherwise (`parts[0]`, `parts["0"]`).
        """
        below = _below(target, unit)
        return below if below in (target, "·") else f"· {text(target).removeprefix(self.paths.module(unit.path))}"

    # ── what is used outside ───────────────────────────────────────────────────────────────────────────────────
    def _used_outside(self, units: list[Unit]) -> dict[Place, set[int]]:
        """The values of units that code outside of the loop reads: in which units."""
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

    def _until_used(self, units: list[Unit]) -> int:
        """How many units a loop can take: up to the first whose values are needed afterwards, unless all are."""
        count = len(units)
        while count > 1:
            used = self._used_outside(units[:count])
            early = [min(turns) for turns in used.values() if len(turns) < count and min(turns) < count - 1]
            if not early:
                break
            count = min(early) + 1
        return count

    # ── a loop ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _loop(self, units: list[Unit], starts: dict[Place, Ref]) -> Loop:
        first, template = units[0], units[1]
        carried: dict[Place, Carried] = {}
        for place, start in starts.items():
            carried[place] = Carried(self._new(), start, self._ref(template, place))
        self.renamed |= {node: self._id(template, place) for node, place in units[-1].places.items()}
        collected = []
        for place, turns in self._used_outside(units).items():
            if turns != {len(units) - 1}:
                places = {self._ref(unit, place): self._new() for unit in units}
                self.turns |= places
                collected.append(Collected(self._ref(template, place), tuple(places.values())))

        def inner(form: Any) -> Any:
            place = first.place(form) if isinstance(form, Ref) else None
            return form if place is None else carried[place].inside

        steps = [step.rewritten(inner) for step in template.steps]
        indices = tuple(unit.key[1] for unit in units)
        return Loop(first.key[0], indices, template.key[1], steps, list(carried.values()), collected)

    def _new(self) -> Ref:
        """A reference to a value that no node of the graph makes."""
        self.pseudo += 1
        return Ref(self.pseudo)

    @staticmethod
    def _id(unit: Unit, at: int) -> int:
        node = unit.steps[at].node
        assert node is not None
        return node.id

    def _ref(self, unit: Unit, place: Place) -> Ref:
        return Ref(self._id(unit, place[0]), place[1], place[2])


def _below(target: str, unit: Unit) -> str:
    """A name relative to the layer of a unit, if it is in there."""
    if target == unit.path:
        return "·"
    return f"·{target[len(unit.path) :]}" if target.startswith((f"{unit.path}.", f"{unit.path}[")) else target


def _segments(steps: Sequence[Step], depth: int) -> list[tuple[Key | None, list[Step]]]:
    """Neighbouring steps of one numbered layer together."""
    found: list[tuple[Key | None, list[Step]]] = []
    for step in steps:
        key = _key(step, depth)
        if not found or found[-1][0] != key:
            found.append((key, []))
        found[-1][1].append(step)
    return found


def _key(step: Step, depth: int) -> Key | None:
    path = ""
    if step.node is not None:
        path = step.node.target if step.node.kind in MODULES else step.node.scope[-1] if step.node.scope else ""
    elif step.guard is not None and step.guard.scope:
        path = step.guard.scope[-1]
    parts = path.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    if len(numbers) <= depth:
        return None
    at = numbers[depth]
    return ".".join(parts[:at]), int(parts[at])


def _units(segments: list[tuple[Key | None, list[Step]]], start: int) -> tuple[list[Unit], list[Step], int]:
    """(units of layers that follow each other, glue that belongs to none, the segment after them)."""
    layers: list[Unit] = []
    glue: list[list[Step]] = []
    at = start
    while at < len(segments):
        key, steps = segments[at]
        if key is None or (layers and key != (layers[-1].key[0], layers[-1].key[1] + 1)):
            break
        layers.append(Unit(key, steps))
        at += 1
        between = at + 1 < len(segments) and segments[at][0] is None
        following = segments[at + 1][0] if between else None
        if between and following == (key[0], key[1] + 1):
            glue.append(segments[at][1])
            at += 1
        else:
            glue.append([])
    if not any(glue):
        return layers, [], at
    size = len(glue[0])
    tail = segments[at][1] if at < len(segments) and segments[at][0] is None else []
    glue[-1], rest = tail[:size], tail[size:]
    units = [Unit(layer.key, [*layer.steps, *part]) for layer, part in zip(layers, glue, strict=True)]
    return units, rest, at + 1 if tail else at
