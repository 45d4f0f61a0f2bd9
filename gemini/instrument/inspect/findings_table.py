"""Findings as a table, and as JSON."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemini.instrument.inspect.finding import KINDS, Finding

if TYPE_CHECKING:
    from rich.table import Table


def table(findings: Sequence[Finding]) -> Table:
    """Return a table with one row per finding; paths are relative to the working directory."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    made.add_column("where", no_wrap=True, overflow="ignore")
    made.add_column("kind", no_wrap=True)
    made.add_column("what", no_wrap=True, overflow="ellipsis", max_width=44)
    made.add_column("source", no_wrap=True, overflow="ellipsis", ratio=1)
    before = ""
    for finding in findings:
        if before and finding.file != before:
            made.add_row()
        before = finding.file
        kind = Text(finding.kind, style=f"black on {KINDS[finding.kind].colour}")
        name = finding.name.removeprefix("__main__.")
        made.add_row(Text(f"{relative(finding.file)}:{finding.line}"), kind, Text(name), Text(finding.text))
    return made


def summary(findings: Sequence[Finding], files: int) -> str:
    """Return `41 findings in 3 files: 5 layer, …`, the kinds in the order of `KINDS`."""
    counts = Counter(finding.kind for finding in findings)
    named = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    total = f"{len(findings)} finding{'s' if len(findings) != 1 else ''} in {files} file{'s' if files != 1 else ''}"
    return f"{total}: {named}" if named else total


def to_json(findings: Sequence[Finding], files: Sequence[str]) -> str:
    """Return all findings and the files that were read, as JSON text."""
    return json.dumps({"files": list(files), "findings": [finding.to_json() for finding in findings]}, indent=1)


def relative(path: str) -> str:
    """Return `path` relative to the working directory, unless it is outside of it."""
    try:
        seen = os.path.relpath(path)
    except ValueError:
        return path
    return path if seen.startswith(os.pardir) else seen
