"""Forward body: statements in autograd modes and loops, in paragraphs headed by their scope.

Values that are dead at the end of a paragraph are deleted there, unless their name is about to be set again.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gemini.codegen.block_headers import base_region, contexts, loop_header, repeat_header
from gemini.codegen.comments import Paragraph
from gemini.codegen.liveness import STRIDE, Liveness
from gemini.codegen.recomputed_parts import PartInterface, group_by_checkpoint, may_run_twice, part_lines
from gemini.codegen.stage_statements import Item, Loop, StageStatement
from gemini.codegen.statements import Statements
from gemini.codegen.value_names import scope_word, unique
from gemini.ir.autograd_modes import Region
from gemini.ir.graph import Graph
from gemini.ir.node import MODULES
from gemini.ir.pytree import Ref

_INDENT = "    "
_ROW = 96
_LONG_PATH = 28
_OFTEN = 2
_Placed = tuple[Any, int]  # a statement or loop, and its end position


class ForwardBody:
    """Assembles the statements of `forward`."""

    def __init__(self, graph: Graph, statements: Statements, liveness: Liveness) -> None:
        self.graph, self.statements, self.liveness = graph, statements, liveness
        self.base = base_region(graph)
        self.lives = liveness.lives
        self.deaths = sorted((end, name) for name, needed in self.lives.items() for _, end in needed.spans)
        self.numbers = liveness.numbers()
        self.lines: list[str] = []
        self.header = ""  # the first line of the current loop
        self.appended: dict[
            int, list[tuple[str, Ref]]
        ] = {}  # values that are appended to lists, by the node that makes them
        self.retained: set[str] = set()  # names that the current part returns

    def write(self, items: list[Item]) -> list[str]:
        """Return the lines of the body, indented relative to it."""
        ends = [_position(item) for item in items[1:]] + [self.liveness.last] * bool(items)
        for number, placed in group_by_checkpoint([*zip(items, ends, strict=True)]):
            with self._part([item for item, _ in placed] if number else [], ""):
                for region, group in _group_by_region(placed, self._region):
                    self._group(region, list(group))
        return self.lines

    @contextmanager
    def _part(self, run: list[Item], space: str) -> Iterator[None]:
        """Write the statements of one activation checkpoint inside, which backward recomputes; none: write plainly."""
        inside = [item for item in run if isinstance(item, StageStatement)]
        nodes = [step.node for item in inside for step in item.steps if step.node is not None]
        if not nodes or not may_run_twice(self.graph, nodes, self.statements.shares):
            yield
            return
        self._blank()
        begin, appended = len(self.lines), {node.id: self.appended.pop(node.id, []) for node in nodes}
        places = self.statements.bindings.places
        kept = [places[value][0] for found in appended.values() for _, value in found if value in places]
        interface = PartInterface(inside, self.liveness, kept)
        self.retained = set(interface.outputs)
        yield
        self.retained = set()
        body, self.lines[begin:] = self.lines[begin:], []
        name = unique("recomputed", self.statements.write.taken)
        checkpoint = self.statements.imports.name("torch.utils.checkpoint", "checkpoint")
        names = self.statements.paths.local.values()
        is_random = any(node.random for node in nodes)
        self.lines += part_lines(interface, body, space, names, name, checkpoint, is_random)
        for found in appended.values():
            self.lines += [f"{space}{listed}.append({self.statements.value(value)})" for listed, value in found]
        if interface.dead and interface.end < self.liveness.last - STRIDE:
            self.lines += [f"{space}del {row}" for row in _rows(sorted(interface.dead))]
        self._blank()

    def _region(self, item: Item) -> Region | None:
        """Return the region of an item, if it differs from that of the call; of a loop, if it is uniform."""
        found = {self._region(one) for one in item.body} if isinstance(item, Loop) else set()
        if isinstance(item, Loop):
            return found.pop() if len(found) == 1 else None
        region = next((step.node.region for step in reversed(item.steps) if step.node is not None), None)
        return None if region == self.base or self.base is None else region

    def _group(self, region: Region | None, items: list[tuple[Item, int]]) -> None:
        """Write items of one region; neighbours share one `with`, so that autocast reuses its cast weights."""
        space = self._enter(region, "")
        run: list[StageStatement] = []
        for item, end in items:
            if isinstance(item, StageStatement):
                run.append(item)
            if run and (isinstance(item, Loop) or end == items[-1][1]):
                self._paragraphs(run, space, item.start if isinstance(item, Loop) else end)
                run = []
            if isinstance(item, Loop):
                self._loop(item, space, region)

    def _enter(self, region: Region | None, space: str) -> str:
        if region is None or self.base is None:
            return space
        self._blank()
        self.lines.append(f"{space}with {', '.join(contexts(region, self.base))}:")
        return space + _INDENT

    # ── paragraphs ─────────────────────────────────────────────────────────────────────────────────────────────
    def _paragraphs(self, run: Sequence[StageStatement], space: str, end: int, loop: Loop | None = None) -> None:
        """Write statements up to a position `end`, of the body of a loop if one is passed."""
        turn = -1 if loop is None else loop.end
        paragraphs = Paragraph.split(run, {} if loop is None else self._headings(loop))
        starts = [paragraph.statements[0].position for paragraph in paragraphs]
        for at, paragraph in enumerate(paragraphs):
            if paragraph.heading:
                self._blank()
                self.lines.append(f"{space}# {paragraph.heading}")
            elif at:
                self._blank()
            with self._alias(paragraph, space):
                self._statements(paragraph.statements, space)
            following = starts[at + 1] if at + 1 < len(starts) else end
            until = starts[at + 2] if at + 2 < len(starts) else max(end, following + STRIDE if end != turn else end)
            self._drop(paragraph.statements[0].position, following, until, space)

    def _headings(self, loop: Loop) -> dict[str, str]:
        """Return how headings name the layers of a loop; a single layer per iteration is not named."""
        local = self.statements.paths.local
        return {path: local[path] if loop.width > 1 else "" for path in loop.layers}

    @contextmanager
    def _alias(self, paragraph: Paragraph, space: str) -> Iterator[None]:
        """Set a variable for the scope of a paragraph, where its modules have long names and are used repeatedly."""
        paths, scope = self.statements.paths, paragraph.scope
        uses = [step.node for statement in paragraph.statements for step in statement.steps if step.node is not None]
        inside = [node for node in uses if node.kind in MODULES and node.target.startswith(f"{scope}.")]
        held = scope and paths.find(scope) is not None and scope not in paths.local
        if not held or len(inside) < _OFTEN or len(paths.module(scope)) < _LONG_PATH:
            yield
            return
        name = unique(scope_word(scope), self.statements.write.taken)
        self.lines.append(f"{space}{name} = {paths.module(scope)}")
        paths.local[scope] = name
        yield
        del paths.local[scope]

    def _statements(self, run: Sequence[StageStatement], space: str) -> None:
        for statement in run:
            self.lines += [space + line for line in self.statements.lines(statement)]
            for step in statement.steps:
                for name, value in self.appended.get(step.node.id, ()) if step.node is not None else ():
                    self.lines.append(f"{space}{name}.append({self.statements.value(value)})")

    def _drop(self, start: int, following: int, until: int, space: str) -> None:
        """Delete values that died between two positions and are not set again before a third."""
        if following >= self.liveness.last:
            return
        dead = set()
        for at in range(bisect_left(self.deaths, (start,)), bisect_left(self.deaths, (following,))):
            name = self.deaths[at][1]
            spans = self.lives[name]
            latest = spans.latest(following)
            if latest is None or not start <= latest[1] < following:
                continue  # not set yet, or needed again
            if name not in self.numbers | self.retained and not spans.begins_in(following, until):
                dead.add(name)
        if dead:
            self.lines += [f"{space}del {part}" for part in _rows(sorted(dead))]

    # ── loops ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _loop(self, loop: Loop, space: str, region: Region | None) -> None:
        before, header, names = loop_header(loop, self.statements, self.liveness)
        self._blank()
        self.lines += [space + line for line in before]
        begin = len(self.lines)
        self.lines += [space + line for line in header]
        self.header = self.lines[-1]
        for collected in loop.collected:
            listed = self.statements.bindings.list_of(collected).name
            self.appended.setdefault(collected.made.node, []).append((listed, collected.made))
        paths = self.statements.paths
        paths.local |= names
        paths.read -= set(names.values())
        self.statements.write.taken |= set(names.values())
        self._turn(loop, space + _INDENT, region)
        for path in names:
            del paths.local[path]
        for carried in loop.carried:
            inside, made = self.statements.value(carried.inside), self.statements.value(carried.made)
            if inside != made:
                self.lines.append(f"{space}{_INDENT}{inside} = {made}")
        self._shorten(loop, space, begin, begin + len(header), list(names.values()))
        self._drop(loop.end, loop.end + 1, loop.end + STRIDE, space)
        self._blank()

    def _shorten(self, loop: Loop, space: str, begin: int, body: int, names: list[str]) -> None:
        """Omit from a header the layers that the body does not use: of some layers, this stage may run only glue code.

        A comment that names a layer is no use of it.
        """
        unused = [name for name in names if name not in self.statements.paths.read]
        if len(unused) == len(names):
            self.lines[begin:body] = [space + repeat_header(loop)]
        elif unused:
            kept = [line for line in self.lines[begin:body] if line.partition(" = ")[0].strip() not in unused]
            self.lines[begin:body] = kept

    def _turn(self, loop: Loop, space: str, region: Region | None) -> None:
        """Write the body of a loop, in regions where they differ from that around the loop."""
        ends = [*(statement.position for statement in loop.body[1:]), loop.end]
        for number, placed in group_by_checkpoint([*zip(loop.body, ends, strict=True)]):
            with self._part([statement for statement, _ in placed] if number else [], space):
                for inner, group in _group_by_region(placed, self._region):
                    run = list(group)
                    at = space if inner == region else self._enter(inner, space)
                    self._paragraphs([statement for statement, _ in run], at, run[-1][1], loop)

    def _blank(self) -> None:
        if self.lines and self.lines[-1] not in ("", self.header) and not self.lines[-1].endswith(":"):
            self.lines.append("")


def _position(item: Item) -> int:
    return item.start if isinstance(item, Loop) else item.position


def _group_by_region(
    items: Iterable[_Placed], region: Callable[[Any], Region | None]
) -> Iterator[tuple[Region | None, Any]]:
    """Group neighbouring items of one region."""
    return itertools.groupby(items, key=lambda placed: region(placed[0]))


def _rows(names: list[str]) -> list[str]:
    """Return names in rows of limited length."""
    rows = [""]
    for name in names:
        row = f"{rows[-1]}, {name}" if rows[-1] else name
        rows = [*rows[:-1], row] if len(row) < _ROW else [*rows, name]
    return rows
