"""The body of `forward`: statements in regions and loops, in paragraphs that name their scope.

Values that are dead at the end of a paragraph are deleted there, unless their name is about to be set again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gemini.capture.forms import Ref
from gemini.capture.graph import Graph
from gemini.capture.node import MODULES
from gemini.capture.regions import Region
from gemini.codegen.headings import Paragraph
from gemini.codegen.liveness import Liveness
from gemini.codegen.loop_text import loop_header
from gemini.codegen.naming import scope_word, unique
from gemini.codegen.program import Item, Loop, Statement
from gemini.codegen.regions import base_region, contexts
from gemini.codegen.skeleton import join
from gemini.codegen.statements import Statements

_INDENT = "    "
_ROW = 96
_LONG_PATH = 28
_OFTEN = 2


class Body:
    """Puts statements together."""

    def __init__(self, graph: Graph, statements: Statements, liveness: Liveness) -> None:
        self.graph, self.statements, self.liveness = graph, statements, liveness
        self.base = base_region(graph)
        self.lives = liveness.lives()
        self.numbers = liveness.numbers()
        self.lines: list[str] = []
        self.appended: dict[int, list[tuple[str, Ref]]] = {}  # values that go into lists, by the node that makes them

    def write(self, items: list[Item]) -> list[str]:
        """The lines of the body, indented relative to it."""
        run: list[Statement] = []
        for item in [*items, None]:
            if isinstance(item, Statement):
                run.append(item)
                continue
            end = item.start if item is not None else self.liveness.last
            self._paragraphs(run, "", "", end)
            run = []
            if item is not None:
                self._loop(item)
        return self.lines

    # ── paragraphs ─────────────────────────────────────────────────────────────────────────────────────────────
    def _paragraphs(self, run: Sequence[Statement], space: str, inside: str, end: int, turn: int | None = None) -> None:
        """Statements up to a position `end`; `turn` is where a loop goes on from there."""
        paragraphs = Paragraph.split(run, inside)
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
            until = starts[at + 2] if at + 2 < len(starts) else end
            if turn is not None and at + 1 == len(paragraphs):
                following, until = end, end
            self._drop(paragraph.statements[0].position, following, until, space)

    @contextmanager
    def _alias(self, paragraph: Paragraph, space: str) -> Iterator[None]:
        """A variable for the scope of a paragraph, where its modules have long names and are used repeatedly."""
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

    def _statements(self, run: Sequence[Statement], space: str) -> None:
        entered: Region | None = None
        for statement in run:
            node = statement.main.node
            region = node.region if node is not None else entered
            if region is None or region == self.base or self.base is None:
                entered, inner = None, space
            else:
                inner = space + _INDENT
                if region != entered:
                    self.lines.append(f"{space}with {', '.join(contexts(region, self.base))}:")
                    entered = region
            self.lines += [inner + line for line in self.statements.lines(statement)]
            for step in statement.steps:
                for name, value in self.appended.get(step.node.id, ()) if step.node is not None else ():
                    self.lines.append(f"{inner}{name}.append({self.statements.value(value)})")

    def _drop(self, start: int, following: int, until: int, space: str) -> None:
        """Delete what died between two positions and is not set again before a third."""
        if following >= self.liveness.last:
            return
        dead = []
        for name, spans in self.lives.items():
            earlier = [span for span in spans if span[0] < following]
            if not earlier or not start <= max(earlier)[1] < following:
                continue  # not set yet, still needed, or deleted before
            if name not in self.numbers and not any(following <= begin < until for begin, _ in spans):
                dead.append(name)
        if dead:
            self.lines += [f"{space}del {part}" for part in _rows(sorted(dead))]

    # ── loops ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _loop(self, loop: Loop) -> None:
        before, header, name = loop_header(loop, self.statements, self.liveness)
        self._blank()
        self.lines += before
        begin = len(self.lines)
        self.lines += header
        template = join(loop.prefix, str(loop.template))
        self.statements.paths.local[template] = name
        for collected in loop.collected:
            listed = self.statements.bindings.list_of(collected).name
            self.appended.setdefault(collected.made.node, []).append((listed, collected.made))
        self._paragraphs(loop.body, _INDENT, template, loop.end, turn=loop.start)
        del self.statements.paths.local[template]
        for carried in loop.carried:
            inside, made = self.statements.value(carried.inside), self.statements.value(carried.made)
            if inside != made:
                self.lines.append(f"{_INDENT}{inside} = {made}")
        if not any(re.search(rf"\b{name}\b", line) for line in self.lines[begin + len(header) :]):
            # Only glue of the layers is in this stage, not the layers.
            self.lines[begin : begin + len(header)] = [f"for _ in range({len(loop.indices)}):"]
        self._blank()

    def _blank(self) -> None:
        if self.lines and self.lines[-1] and not self.lines[-1].endswith(":"):
            self.lines.append("")


def _rows(names: list[str]) -> list[str]:
    """Names in rows that are not too long."""
    rows = [""]
    for name in names:
        row = f"{rows[-1]}, {name}" if rows[-1] else name
        rows = [*rows[:-1], row] if len(row) < _ROW else [*rows, name]
    return rows
