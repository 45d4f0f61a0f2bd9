"""Verification of an edited file: it parses, has as many lines, and binds the same top-level names."""

from __future__ import annotations

import ast
from bisect import bisect_left

from gemini.errors import EditError
from gemini.instrument.pass_manager.prelude_import import RESERVED
from gemini.instrument.text.lines import Lines
from gemini.instrument.text.parser import parse_again, parse_edited
from gemini.instrument.text.positions import first_line
from gemini.instrument.text.source_file import SourceFile
from gemini.instrument.text.splice import Spliced


def verify_edited(source: SourceFile, spliced: Spliced) -> SourceFile:
    """Return `source` with the edited text, parsed; raise `EditError` or `SyntaxError` if it is not valid."""
    text = spliced.text
    before, after = source.lines.line_ends, Lines(text).line_ends
    if before != after:
        raise EditError(f"the edited text has {after} line ends, the original {before}")
    edited = source.with_text(text)
    edited.__dict__["tree"] = tree = _parse(source, spliced)
    shared = {id(node) for node in tree.body} & {id(node) for node in source.tree.body}
    names = bound_names([node for node in source.tree.body if id(node) not in shared], source.text)
    changed = (names ^ bound_names([node for node in tree.body if id(node) not in shared], text)) - {RESERVED}
    if changed:
        lost, added = sorted(changed & names), sorted(changed - names)
        changes = [f"removes {', '.join(lost)}"] * bool(lost) + [f"adds {', '.join(added)}"] * bool(added)
        raise EditError(f"the edited text {' and '.join(changes)} at the top level of the module")
    return edited


def _parse(source: SourceFile, spliced: Spliced) -> ast.Module:
    """Parse the edited statements only, or the whole text if that fails."""
    try:
        ranges = _ranges_to_parse(source.tree.body, spliced.positions.lines, source.lines.count)
        return parse_edited(source.tree, spliced.text, ranges, source.path)
    except SyntaxError:
        return parse_again(spliced.text, source.path)  # reports the fault with its context


def _ranges_to_parse(body: list[ast.stmt], lines: tuple[int, ...], count: int) -> list[tuple[int, int]]:
    """Return the ranges of lines to parse again, each of whole statements.

    A range ends after the last line of a statement (statements that share a line stay together), so blank lines and
    comments belong to the statement below them.
    """
    ends: list[int] = []
    for node in body:
        if ends and first_line(node) <= ends[-1]:
            ends[-1] = max(ends[-1], node.end_lineno or node.lineno)
        else:
            ends.append(node.end_lineno or node.lineno)
    if not ends or ends[-1] < count:
        ends.append(count)
    touched = sorted({bisect_left(ends, line) for line in lines})
    return [(ends[at - 1] + 1 if at else 1, ends[at]) for at in touched]


def bound_names(body: list[ast.stmt], text: str = "global :=") -> set[str]:
    """Return the names that a module's statements bind in it, including those that functions declare `global`.

    `text` is the module's source: without `global` and walrus in it, most of the tree is skipped.
    """
    inside_functions = "global" in text
    walrus = ":=" in text
    names: set[str] = set()
    stack: list[tuple[ast.AST, bool]] = [(node, True) for node in body]
    while stack:
        node, top = stack.pop()
        if isinstance(node, ast.Global):
            names.update(node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if top:
                names.add(node.name)
            if inside_functions:
                stack.extend((child, False) for child in node.body)
            if top and walrus:
                stack.extend((child, True) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt))
        elif not top:
            stack.extend((child, False) for child in ast.iter_child_nodes(node) if isinstance(child, _BLOCKS))
        elif isinstance(node, ast.Lambda):
            continue
        else:
            _collect(node, names)
            stack.extend((child, True) for child in ast.iter_child_nodes(node) if walrus or _may_bind(child))
    return names


_BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)
_TARGETS = (*_BLOCKS, ast.Name, ast.Tuple, ast.List, ast.Starred, ast.withitem, ast.pattern, ast.alias)


def _may_bind(node: ast.AST) -> bool:
    """Return whether a top-level node, in a file without walrus, can bind a name or contain one that does."""
    return isinstance(node, _TARGETS)


def _collect(node: ast.AST, names: set[str]) -> None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        names.add(node.id)
    elif isinstance(node, ast.alias):
        names.add(node.asname or node.name.partition(".")[0])
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        names.add(node.name)
    elif isinstance(node, ast.MatchMapping) and node.rest:
        names.add(node.rest)
