"""Rolled loops: equal neighbouring layers of a stage, and repeated calls of one module, rolled into a `for`.

Layers are equal one by one (`layers.0`, `layers.1` …), or a few at a time where they alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemini.codegen.attribute_paths import Paths
from gemini.codegen.loop_search import Key, LoopFinder, LoopTurnSteps, Place
from gemini.codegen.roll_calls import roll_repeats
from gemini.codegen.stage_interface import Interface
from gemini.codegen.stage_statements import Carried, Loop
from gemini.codegen.stage_steps import StageStep
from gemini.ir.graph import Graph
from gemini.ir.node import MODULES
from gemini.ir.pytree import Ref

_WIDEST = 4  # layers per iteration


@dataclass
class Rolled:
    """Steps and loops, with the values that code after a loop refers to by another name."""

    items: list[StageStep | Loop]
    renamed: dict[int, int] = field(default_factory=dict)  # nodes of the last iteration → nodes of the body
    turns: dict[Ref, Ref] = field(default_factory=dict)  # values of all iterations → places in a list

    def outside(self, ref: Any) -> Any:
        """Return a reference as code outside the loop writes it."""
        if not isinstance(ref, Ref):
            return ref
        if ref in self.turns:
            return self.turns[ref]
        return Ref(self.renamed[ref.node], ref.source, ref.path) if ref.node in self.renamed else ref

    def inside(self, loop: Loop) -> Callable[[Any], Any]:
        """Return the mapping of references for the body of a loop: its own values stay."""
        own = {step.node.id for step in loop.steps if step.node is not None}
        return lambda ref: ref if isinstance(ref, Ref) and ref.node in own else self.outside(ref)


def roll(
    graph: Graph, steps: list[StageStep], interface: Interface, paths: Paths, apart: Collection[int] = ()
) -> Rolled:
    """Return the steps of a stage with its equal layers rolled; `paths` maps modules to their access in the stage.

    Nodes in `apart` are never treated as equal.
    """
    leaving = [port.value for port in interface.outputs if isinstance(port.value, Ref)]
    alike = LoopFinder(graph, paths, steps, leaving, apart)
    rolled = Rolled(roll_repeats(alike, _Layers(alike).roll(steps, 0)))
    rolled.renamed, rolled.turns = alike.renamed, alike.turns
    for at, item in enumerate(rolled.items):
        if isinstance(item, StageStep):
            rolled.items[at] = item.with_refs(rolled.outside)
            continue
        item.steps = [step.with_refs(rolled.inside(item)) for step in item.steps]
        item.carried = [Carried(one.inside, rolled.outside(one.start), one.made) for one in item.carried]
    return rolled


class _Layers:
    """Rolls numbered layers."""

    def __init__(self, alike: LoopFinder) -> None:
        self.alike = alike

    def roll(self, steps: list[StageStep], depth: int) -> list[StageStep | Loop]:
        """Roll layers that are numbered by the `depth`-th number in their names, then deeper ones."""
        segments = _segments(steps, depth)
        if not any(key is not None for key, _ in segments):
            return list(steps)
        done: list[StageStep | Loop] = []
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

    def _loops(self, units: list[LoopTurnSteps]) -> list[Loop | LoopTurnSteps]:
        """Return the parts with runs of equal ones rolled into loops, of one or a few alternating layers each."""
        found: list[Loop | LoopTurnSteps] = []
        at = 0
        while at < len(units):
            run, starts = self._best_run(units, at)
            if run:
                found.append(self.alike.loop(run, starts))
                at += len(run) * run[0].width
            else:
                found.append(units[at])
                at += 1
        return found

    def _best_run(self, units: list[LoopTurnSteps], at: int) -> tuple[list[LoopTurnSteps], dict[Place, Ref]]:
        """Return the iterations of the loop from a part on that saves most steps; none if there is no loop."""
        best: tuple[int, list[LoopTurnSteps], dict[Place, Ref]] = (0, [], {})
        count = len(units) - at
        for width in range(1, min(_WIDEST, count // 2) + 1):
            run, starts = self.alike.find_run(_group_units(units, at, width))
            saved = (len(run) - 1) * len(run[0].steps)
            if saved > best[0] and self.alike.is_worth_it(run):
                best = saved, run, starts
            if len(run) * width == count:
                break
        return best[1:]


def _group_units(units: list[LoopTurnSteps], begin: int, width: int) -> Iterator[LoopTurnSteps]:
    """Yield parts of `width` layers each; the remainder at the end is dropped."""
    for at in range(begin, len(units) - width + 1, width):
        if width == 1:
            yield units[at]
            continue
        steps = [step for unit in units[at : at + width] for step in unit.steps]
        yield LoopTurnSteps(units[at].key, steps, width)


def _segments(steps: Sequence[StageStep], depth: int) -> list[tuple[Key | None, list[StageStep]]]:
    """Group neighbouring steps of one numbered layer."""
    found: list[tuple[Key | None, list[StageStep]]] = []
    for step in steps:
        key = _key(step, depth)
        if not found or found[-1][0] != key:
            found.append((key, []))
        found[-1][1].append(step)
    return found


def _key(step: StageStep, depth: int) -> Key | None:
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


def _units(
    segments: list[tuple[Key | None, list[StageStep]]], start: int
) -> tuple[list[LoopTurnSteps], list[StageStep], int]:
    """Return (parts of consecutive layers, glue code that belongs to none, the segment after them)."""
    layers: list[LoopTurnSteps] = []
    glue: list[list[StageStep]] = []
    at = start
    while at < len(segments):
        key, steps = segments[at]
        if key is None or (layers and key != (layers[-1].key[0], layers[-1].key[1] + 1)):
            break
        layers.append(LoopTurnSteps(key, steps))
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
    units = [LoopTurnSteps(layer.key, [*layer.steps, *part]) for layer, part in zip(layers, glue, strict=True)]
    return units, rest, at + 1 if tail else at
