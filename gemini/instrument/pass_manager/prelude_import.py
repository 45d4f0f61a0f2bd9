"""Prelude: the one import that instrumentation adds to a file.

Passes insert calls on the reserved name ``__gemini__``. `place` finds where ``import gemini.managed as __gemini__`` can
stand without moving a line and before anything that may use it:

    import os                      import gemini.managed as __gemini__; import os
    \"\"\"Doc.\"\"\"  (then a def)      \"\"\"Doc.\"\"\"; import gemini.managed as __gemini__
    (blank line, then a def)       import gemini.managed as __gemini__

A file without such a place (its first line begins a compound statement), or with another use of the name, gets no
import; each use becomes an expression that imports the module, see `inline`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from gemini.instrument.text.edits import Edit
from gemini.instrument.text.positions import first_line
from gemini.instrument.text.source_file import SourceFile

RESERVED = "__gemini__"
IMPORT = f"import gemini.managed as {RESERVED}"
INLINE = '__import__("gemini.managed", fromlist=["__name__"])'

_USE = re.compile(rf"\b{RESERVED}\b")
_COMPOUND = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.Match,
    *([ast.TryStar] if hasattr(ast, "TryStar") else []),
)


def uses(edits: Iterable[Edit]) -> bool:
    """Return whether the new text of any edit uses the reserved name."""
    return any(isinstance(part, str) and _USE.search(part) for edit in edits for part in edit.parts)


def is_present(source: SourceFile) -> bool:
    """Return whether the file imports the reserved name already, as a dumped file does."""
    return IMPORT in source.text and any(
        isinstance(node, ast.Import) and any(alias.asname == RESERVED for alias in node.names)
        for node in source.tree.body
    )


def place(source: SourceFile) -> Edit | None:
    """Return the edit that adds the import; None where the file has no place for it."""
    if RESERVED in source.text:
        return None  # the script uses the name itself
    reason = "the import that instrumented code uses"
    before: ast.stmt | None = None
    for node in _after_docstring(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__" and not node.level:
            before = node
            continue
        if not isinstance(node, _COMPOUND):
            return Edit.before(node, f"{IMPORT}; ", reason)
        break
    before = before or _find_docstring(source.tree)
    if before is not None:
        return Edit.after(before, f"; {IMPORT}", reason)
    line = _free_line(source)
    return Edit.insert(line, 0, IMPORT, reason) if line else None


def inline(edits: Iterable[Edit]) -> list[Edit]:
    """Return the edits with every use of the reserved name as an importing expression."""
    return [edit.with_text(lambda text: _USE.sub(lambda _: INLINE, text)) for edit in edits]


def _find_docstring(tree: ast.Module) -> ast.stmt | None:
    first = tree.body[0] if tree.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first
    return None


def _after_docstring(tree: ast.Module) -> list[ast.stmt]:
    return tree.body[1:] if _find_docstring(tree) is not None else tree.body


def _free_line(source: SourceFile) -> int:
    """Return the number of a blank line above the first statement; 0 without one.

    Comment lines do not count: the first two may declare the encoding.
    """
    first = min(first_line(node) for node in source.tree.body)
    for number in range(first - 1, 0, -1):
        line = source.lines.line(number)
        if not line.strip(" \t\f"):
            # A blank line below a backslash belongs to the line above it.
            if number > 1 and source.lines.line(number - 1).endswith("\\"):
                continue
            return number
    return 0
