"""Recognition over all files of a program: sources in, findings out."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from gemini.instrument.inspect.call_findings import find_meanings
from gemini.instrument.inspect.finding import Finding
from gemini.instrument.inspect.name_evidence import Evidence, FileEvidence
from gemini.instrument.inspect.statement_findings import find_statements
from gemini.instrument.output.node_headline import headline
from gemini.instrument.text.source_file import SourceFile


def recognise(sources: Iterable[SourceFile]) -> tuple[Finding, ...]:
    """Return the findings in `sources`, which are analysed together, in the order of files and lines.

    Raises the `SyntaxError` of a file that is not Python.
    """
    evidence = Evidence(sources)
    return tuple(finding for file in evidence.files for finding in sorted(_file(evidence, file)))


def _file(evidence: Evidence, file: FileEvidence) -> set[Finding]:
    found = list(find_meanings(evidence, file))
    nodes: list[tuple[ast.expr | ast.stmt, str, str]] = [(each.node, each.kind, each.name) for each in found]
    nodes.extend(find_statements(evidence, file, found))
    return {
        Finding(
            file=file.source.path,
            line=node.lineno,
            column=node.col_offset,
            end_line=node.end_lineno or node.lineno,
            end_column=node.end_col_offset or node.col_offset,
            kind=kind,
            name=name,
            text=headline(node, file.source),
            is_statement=isinstance(node, ast.stmt),
        )
        for node, kind, name in nodes
    }
