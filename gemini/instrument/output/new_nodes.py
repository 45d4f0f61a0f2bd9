"""Which nodes of an instrumented tree are new.

The tree of the new text exists twice: with positions in the new text, and, in `Instrumented`, with positions in the
original. A node whose like, at that place of the original, does not exist there is new. A call that a pass wraps
around an expression carries that expression's place, so where several nodes are alike the outermost ones are new:

    original       Net()                                  one Call at 5–10
    instrumented   __gemini__.on(__gemini__.model(Net())) three Calls at 5–10: the outer two are new
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Hashable

from gemini.instrument.pass_manager.instrumented_file import Instrumented


def new_nodes(done: Instrumented, tree: ast.Module) -> set[ast.AST]:
    """The nodes of `tree`, parsed from the text of `done`, that passes brought or altered."""
    if not done.changed:
        return set()
    known = Counter(map(_likeness, ast.walk(done.source.tree)))
    pairs = list(zip(ast.walk(tree), ast.walk(done.tree)))
    found: set[ast.AST] = set()
    for node, placed in reversed(pairs):  # from the inside out
        likeness = _likeness(placed)
        if known[likeness]:
            known[likeness] -= 1
        elif not isinstance(node, (ast.expr_context, ast.operator, ast.Module)):
            found.add(node)
    return found


def _likeness(node: ast.AST) -> Hashable:
    """What two nodes have in common that are the same: their type, place and own words."""
    place = vars(node)
    words = [
        repr(place[name]) for name in node._fields if name in place and not isinstance(place[name], (ast.AST, list))
    ]
    position = (place.get("lineno"), place.get("col_offset"), place.get("end_lineno"), place.get("end_col_offset"))
    return type(node).__name__, position, tuple(words)
