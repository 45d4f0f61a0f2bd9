"""Folding of large outlines.

Blocks without recognised or changed nodes are folded first, then runs of such statements, then the bodies of long
functions. A folded item shows how many nodes it hides and the recognised kinds among them: `… 12 nodes (3 × layer)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gemini.instrument.inspect.ast_outline import OutlineItem

_LONG = 40  # items of a function whose body may be hidden although it has recognised nodes


def fold(root: OutlineItem, *, depth: int | None = None, most: int | None = None) -> OutlineItem:
    """Fold `root` in place: below `depth`, then, while it has more than `most` items, further."""
    if depth is not None:
        _fold_below(root, depth)
    if most is not None:
        for step in (_fold_quiet_blocks, _fold_quiet_runs, _fold_functions):
            if root.count > most:
                step(root)
    return root


def fold_items(items: Sequence[OutlineItem]) -> OutlineItem:
    """Return the item that replaces hidden ones."""
    hidden = sum(item.size for item in items)
    kinds = Counter(each.kind for item in items for each in item.walk() if each.kind)
    named = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common(4))
    return OutlineItem("", f"… {hidden} node{'s' if hidden != 1 else ''}" + (f" ({named})" if named else ""), hidden)


def _fold_below(item: OutlineItem, depth: int) -> None:
    for part in item.parts:
        _fold_below(part, depth - 1)
    if depth <= 0 and item.body:
        item.body = [fold_items(item.body)]
    if depth <= 0 and item.parts:
        item.parts = [fold_items(item.parts)]
    for child in item.body:
        _fold_below(child, depth - 1)


def _fold_quiet_blocks(item: OutlineItem) -> None:
    for child in item.body:
        if child.body and not any(each.matters for each in child.body):
            child.body = [fold_items(child.body)]
        else:
            _fold_quiet_blocks(child)


def _fold_quiet_runs(item: OutlineItem) -> None:
    shown: list[OutlineItem] = []
    run: list[OutlineItem] = []
    for child in [*item.body, None]:
        if child is not None and not child.matters:
            run.append(child)
            continue
        shown.extend([fold_items(run)] if len(run) > 1 else run)
        run = []
        if child is not None:
            _fold_quiet_runs(child)
            shown.append(child)
    item.body = shown


def _fold_functions(item: OutlineItem) -> None:
    for child in item.body:
        if child.type.endswith("FunctionDef") and child.count > _LONG:
            child.body = [fold_items(child.body)]
        else:
            _fold_functions(child)
