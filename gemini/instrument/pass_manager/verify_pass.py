"""What must hold of a file after a pass: it parses, has as many lines, and binds the same top-level names."""

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


def verified(source: SourceFile, spliced: Spliced) -> SourceFile:
    """`source` with the edited text, parsed; raises `EditError` or `SyntaxError` where something does not hold."""
    text = spliced.text
    before, after = source.lines.line_ends, Lines(text).line_ends
    if before != after:
        raise EditError(f"the edited text has {after} line ends, the original {before}")
    edited = source.with_text(text)
    edited.__dict__["tree"] = tree = _parsed(source, spliced)
    kept = {id(node) for node in tree.body} & {id(node) for node in source.tree.body}
    names = bound_names([node for node in source.tree.body if id(node) not in kept], source.text)
    changed = (names ^ bound_names([node for node in tree.body if id(node) not in kept], text)) - {RESERVED}
    if changed:
        lost, added = sorted(changed & names), sorted(changed - names)
        said = [f"removes {', '.join(lost)}"] * bool(lost) + [f"adds {', '.join(added)}"] * bool(added)
        raise EditError(f"the edited text {' and '.join(said)} at the top level of the module")
    return edited


def _parsed(source: SourceFile, spliced: Spliced) -> ast.Module:
    """The tree of the edited text: only what the edits touched is parsed, unless that fails."""
    try:
        ranges = _touched(source.tree.body, spliced.positions.lines, source.lines.count)
        return parse_edited(source.tree, spliced.text, ranges, source.path)
    except SyntaxError:
        return parse_again(spliced.text, source.path)  # reports the fault in its surroundings


def _touched(body: list[ast.stmt], lines: tuple[int, ...], count: int) -> list[tuple[int, int]]:
    """The ranges of lines to parse anew so that no statement is cut.

    The file is cut into ranges behind the last line of each statement (statements that share a line stay together), so
    that blank lines, comments and whatever else precedes a statement belong to it.
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
    """The names that running a module's statements binds in it, those that functions declare `global` included.

    `text` is the module's source: where it has no `global` and no walrus, most of the tree need not be looked at.
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
    """Whether a top-level node can bind a name or hold one that does, where no walrus is about."""
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
