"""Folding of large outlines: what is hidden, in which order, and what stands in its place.

First go blocks in which nothing is recognised or changed, then runs of such statements, at last the bodies of long
functions. A folded item says how many nodes it hides and what was recognised among them: `… 12 nodes (3 × layer)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gemini.instrument.inspect.ast_outline import Item

_LONG = 40  # items of a function whose body may be hidden though something in it is recognised


def fold(root: Item, *, depth: int | None = None, most: int | None = None) -> Item:
    """Fold `root` in place: everything deeper than `depth`, then, while there are more items than `most`, the rest."""
    if depth is not None:
        _fold_below(root, depth)
    if most is not None:
        for step in (_fold_quiet_blocks, _fold_quiet_runs, _fold_functions):
            if root.count > most:
                step(root)
    return root


def folded(items: Sequence[Item]) -> Item:
    """The item that stands for hidden ones."""
    hidden = sum(item.size for item in items)
    kinds = Counter(each.kind for item in items for each in item.walk() if each.kind)
    named = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common(4))
    return Item("", f"… {hidden} node{'s' if hidden != 1 else ''}" + (f" ({named})" if named else ""), hidden)


def _fold_below(item: Item, depth: int) -> None:
    for part in item.parts:
        _fold_below(part, depth - 1)
    if depth <= 0 and item.body:
        item.body = [folded(item.body)]
    if depth <= 0 and item.parts:
        item.parts = [folded(item.parts)]
    for child in item.body:
        _fold_below(child, depth - 1)


def _fold_quiet_blocks(item: Item) -> None:
    for child in item.body:
        if child.body and not any(each.matters for each in child.body):
            child.body = [folded(child.body)]
        else:
            _fold_quiet_blocks(child)


def _fold_quiet_runs(item: Item) -> None:
    kept: list[Item] = []
    run: list[Item] = []
    for child in [*item.body, None]:
        if child is not None and not child.matters:
            run.append(child)
            continue
        kept.extend([folded(run)] if len(run) > 1 else run)
        run = []
        if child is not None:
            _fold_quiet_runs(child)
            kept.append(child)
    item.body = kept


def _fold_functions(item: Item) -> None:
    for child in item.body:
        if child.type.endswith("FunctionDef") and child.count > _LONG:
            child.body = [folded(child.body)]
        else:
            _fold_functions(child)
