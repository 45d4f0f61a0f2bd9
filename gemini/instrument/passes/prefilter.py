"""Cheap tests before a pass resolves names: triggers, names that may match, calls that are already inserted.

Resolving a name costs much more than reading it. A pass that searches for `torch.device` resolves only names that end
in `device`, and the other names under which the file may have such an object:

    from torch import device as D        D
    make = torch.device                  make
    from mine import Place               Place, whatever object that module binds to it
"""

from __future__ import annotations

import ast
import unicodedata
from collections.abc import Iterator, Sequence, Set

from gemini.instrument.pass_manager.prelude_import import RESERVED
from gemini.instrument.passes.pass_input import Unit


def can_affect(triggers: Sequence[str], text: str) -> bool:
    """Return whether `text` contains one of `triggers`, or there are none."""
    if not triggers or any(trigger in text for trigger in triggers):
        return True
    if text.isascii():
        return False
    # Python reads identifiers in NFKC: ``𝐭orch`` is ``torch``.
    normal = unicodedata.normalize("NFKC", text)
    return any(trigger in normal for trigger in triggers)


def possible_names(unit: Unit, names: Set[str]) -> set[str]:
    """Return `names`, and the other names under which this file may have such objects."""
    found = set(names)
    for alias in unit.nodes(ast.alias):
        if alias.asname is not None and alias.name.rpartition(".")[2] in names:
            found.add(alias.asname)
    for node in unit.nodes(ast.Assign):
        if last_word(node.value) in names:
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    foreign = unit.names.imported_from_user_modules()
    if foreign:
        found |= foreign
        found.update(node.attr for node in unit.nodes(ast.Attribute) if _first_word(node) in foreign)
    return found


def _first_word(expr: ast.expr) -> str:
    while isinstance(expr, ast.Attribute):
        expr = expr.value
    return expr.id if isinstance(expr, ast.Name) else ""


def last_word(expr: ast.expr) -> str:
    """Return the last component of a name or attribute; empty for anything else."""
    if expr.__class__ is ast.Attribute:
        return expr.attr
    return expr.id if isinstance(expr, ast.Name) else ""


def find_mentions(unit: Unit, names: Set[str]) -> Iterator[ast.Attribute | ast.Name]:
    """Yield the name and attribute reads that may refer to an object called one of `names`."""
    spelled = possible_names(unit, names)
    for attribute in unit.nodes(ast.Attribute):
        if attribute.attr in spelled and attribute.ctx.__class__ is ast.Load:
            yield attribute
    for name in unit.nodes(ast.Name):
        if name.id in spelled and name.ctx.__class__ is ast.Load:
            yield name


def is_inserted_call(node: ast.AST | None) -> bool:
    """Return whether `node` is a call such as `__gemini__.on(x)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == RESERVED
    )


def is_inserted(unit: Unit, node: ast.AST | None) -> bool:
    """Return whether `node` is an inserted call, the function of one, or its argument."""
    if node is None:
        return False
    if isinstance(node, ast.Name) and node.id == RESERVED:
        return True
    return is_inserted_call(node) or is_inserted_call(unit.parent(node))
