"""What must hold of a file after a pass: it parses, has as many lines, and binds the same top-level names."""

from __future__ import annotations

import ast

from gemini.errors import EditError
from gemini.instrument.lines import Lines
from gemini.instrument.parsing import parse_again
from gemini.instrument.prelude import RESERVED
from gemini.instrument.source import SourceFile


def verified(source: SourceFile, text: str) -> SourceFile:
    """`source` with the edited `text`, parsed; raises `EditError` or `SyntaxError` where something does not hold."""
    before, after = source.lines.line_ends, Lines(text).line_ends
    if before != after:
        raise EditError(f"the edited text has {after} line ends, the original {before}")
    edited = source.with_text(text)
    tree = parse_again(text, source.path)
    edited.__dict__["tree"] = tree
    lost_or_new = bound_names(source.tree) ^ bound_names(tree)
    lost_or_new.discard(RESERVED)
    if lost_or_new:
        lost = sorted(lost_or_new & bound_names(source.tree))
        new = sorted(lost_or_new - set(lost))
        said = [f"removes {', '.join(lost)}"] * bool(lost) + [f"adds {', '.join(new)}"] * bool(new)
        raise EditError(f"the edited text {' and '.join(said)} at the top level of the module")
    return edited


def bound_names(tree: ast.Module) -> set[str]:
    """The names that running the module's top level binds, those of functions' `global` statements included."""
    names: set[str] = set()
    stack: list[tuple[ast.AST, bool]] = [(node, True) for node in tree.body]
    while stack:
        node, top = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if top:
                names.add(node.name)
            stack.extend((child, False) for child in node.body)
            stack.extend((child, top) for child in node.decorator_list)
        elif isinstance(node, ast.Global):
            names.update(node.names)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if top:
                names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif top:
            _collect(node, names)
            stack.extend((child, True) for child in ast.iter_child_nodes(node))
        else:
            stack.extend((child, False) for child in ast.iter_child_nodes(node) if isinstance(child, _BLOCKS))
    return names


_BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def _collect(node: ast.AST, names: set[str]) -> None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        names.add(node.id)
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        names.add(node.name)
    elif isinstance(node, ast.MatchMapping) and node.rest:
        names.add(node.rest)
