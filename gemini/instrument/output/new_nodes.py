"""New nodes of an instrumented tree.

The tree of the new text exists twice: with positions in the new text, and, in `Instrumented`, with positions in the
original. A node without an equivalent at that position of the original is new. A call that a pass wraps around an
expression has that expression's position, so of several equivalent nodes the outermost ones are new:

    original       Net()                                  one Call at 5–10
    instrumented   __gemini__.on(Net())                   two Calls at 5–10: the outer one is new
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Hashable

from gemini.instrument.pass_manager.instrumented_file import Instrumented


def find_new_nodes(done: Instrumented, tree: ast.Module) -> set[ast.AST]:
    """Return the nodes of `tree`, parsed from the text of `done`, that passes added or changed."""
    if not done.changed:
        return set()
    known = Counter(map(_identity, ast.walk(done.source.tree)))
    pairs = list(zip(ast.walk(tree), ast.walk(done.tree)))
    found: set[ast.AST] = set()
    for node, placed in reversed(pairs):  # from the inside out
        identity = _identity(placed)
        if known[identity]:
            known[identity] -= 1
        elif not isinstance(node, (ast.expr_context, ast.operator, ast.Module)):
            found.add(node)
    return found


def _identity(node: ast.AST) -> Hashable:
    """Return the identity of a node: its type, position and plain fields."""
    place = vars(node)
    words = [
        repr(place[name]) for name in node._fields if name in place and not isinstance(place[name], (ast.AST, list))
    ]
    position = (place.get("lineno"), place.get("col_offset"), place.get("end_lineno"), place.get("end_col_offset"))
    return type(node).__name__, position, tuple(words)
