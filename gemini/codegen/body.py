"""The body of `forward`: statements in regions and loops, with comments that name the scopes and dead values dropped."""

from __future__ import annotations

from gemini.capture.graph import Graph
from gemini.capture.regions import Region
from gemini.codegen.liveness import STRIDE, Liveness
from gemini.codegen.program import Item, Loop, Statement
from gemini.codegen.regions import base_region, contexts
from gemini.codegen.statements import Statements


class Body:
    """Puts statements together."""

    def __init__(self, graph: Graph, statements: Statements, liveness: Liveness) -> None:
        self.graph, self.statements, self.liveness = graph, statements, liveness
        self.base = base_region(graph)
        self.deaths = liveness.deaths()
        self.lines: list[str] = []
        self.region: Region | None = None
        self.scope = ""

    def write(self, items: list[Item]) -> list[str]:
        """The lines of the body, indented relative to it."""
        for item in items:
            assert isinstance(item, Statement), Loop
            self._statement(item, "")
        return self.lines

    def _statement(self, statement: Statement, space: str) -> None:
        node = statement.main.node
        if node is not None:
            self._scope(node.scope[-1] if node.scope else "", space)
        inner = space + self._enter(node.region if node is not None else self.region, space)
        self.lines += [inner + line for line in self.statements.lines(statement)]
        self._drop(statement.position, inner)

    def _scope(self, scope: str, space: str) -> None:
        if scope != self.scope:
            self.scope = scope
            self.region = None if self.region is None else self.region
            self.lines.append(f"{space}# {scope or self.graph.model_name}")

    def _enter(self, region: Region | None, space: str) -> str:
        if region is None or self.base is None or region == self.base:
            self.region = region
            return ""
        found = contexts(region, self.base)
        if region != self.region:
            self.region = region
            self.lines.append(f"{space}with {', '.join(found)}:")
        return "    "

    def _drop(self, position: int, space: str) -> None:
        names = sorted({name for at in range(position, position + STRIDE) for name in self.deaths.get(at, ())})
        if names and position + STRIDE < self.liveness.last:
            self.lines.append(f"{space}del {', '.join(names)}")
