"""Heading comments: statements in paragraphs, each under the scope of the model that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gemini.codegen.stage_statements import StageStatement

_LONG = 12
_SHORT = 3


@dataclass
class Paragraph:
    """Consecutive statements of one scope."""

    scope: str
    heading: str = ""
    statements: list[StageStatement] = field(default_factory=list)

    @staticmethod
    def split(run: Sequence[StageStatement], inside: Mapping[str, str]) -> list[Paragraph]:
        """Return the paragraphs of a run; a few statements of an outer scope after an inner one stay with it.

        Scopes are named relative to `inside`: the layers of a loop iteration, and their names in the body.
        """
        groups: list[Paragraph] = []
        for statement in run:
            node = statement.main.node
            scope = groups[-1].scope if node is None and groups else _scope(statement)
            if not groups or groups[-1].scope != scope:
                groups.append(Paragraph(scope))
            groups[-1].statements.append(statement)
        merged: list[Paragraph] = []
        for group in groups:
            if (merged and _returns(merged[-1].scope, group.scope) and len(group.statements) <= _SHORT) or (
                merged and merged[-1].scope == group.scope
            ):
                merged[-1].statements += group.statements
            else:
                group.heading = _relative(group.scope, inside)
                merged.append(group)
        return [part for group in merged for part in group._pieces()]

    def _pieces(self) -> list[Paragraph]:
        """Cut long paragraphs, so that dead values do not accumulate."""
        pieces = [self.statements[at : at + _LONG] for at in range(0, len(self.statements), _LONG)]
        if len(pieces) > 1 and len(pieces[-1]) <= _SHORT:
            last = pieces.pop()
            pieces[-1] = pieces[-1] + last
        return [Paragraph(self.scope, self.heading if at == 0 else "", part) for at, part in enumerate(pieces)]


def _scope(statement: StageStatement) -> str:
    node = statement.main.node
    return node.scope[-1] if node is not None and node.scope else ""


def _returns(inner: str, outer: str) -> bool:
    """Return whether the second scope encloses the first."""
    return inner.startswith(f"{outer}.") or (not outer and bool(inner))


def _relative(scope: str, inside: Mapping[str, str]) -> str:
    for layer, name in inside.items():
        if scope == layer:
            return name
        if scope.startswith(f"{layer}."):
            return f"{name}{'.' if name else ''}{scope.removeprefix(f'{layer}.')}"
    return scope
