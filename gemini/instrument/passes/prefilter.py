"""Cheap tests before a pass resolves names: can it affect the file, which names may match, what is already inserted.

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


def spellings(unit: Unit, names: Set[str]) -> set[str]:
    """`names`, and every other name under which this file may have an object that is called one of them."""
    found = set(names)
    for alias in unit.nodes(ast.alias):
        if alias.asname is not None and alias.name.rpartition(".")[2] in names:
            found.add(alias.asname)
    for node in unit.nodes(ast.Assign):
        if last_word(node.value) in names:
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    foreign = unit.names.foreign()
    if foreign:
        found |= foreign
        found.update(node.attr for node in unit.nodes(ast.Attribute) if _first_word(node) in foreign)
    return found


def _first_word(expr: ast.expr) -> str:
    while isinstance(expr, ast.Attribute):
        expr = expr.value
    return expr.id if isinstance(expr, ast.Name) else ""


def last_word(expr: ast.expr) -> str:
    """The last component of a name or attribute; empty for anything else."""
    if expr.__class__ is ast.Attribute:
        return expr.attr
    return expr.id if isinstance(expr, ast.Name) else ""


def mentions(unit: Unit, names: Set[str]) -> Iterator[ast.Attribute | ast.Name]:
    """The names and attributes, being read, that may mean an object called one of `names`."""
    spelled = spellings(unit, names)
    for attribute in unit.nodes(ast.Attribute):
        if attribute.attr in spelled and attribute.ctx.__class__ is ast.Load:
            yield attribute
    for name in unit.nodes(ast.Name):
        if name.id in spelled and name.ctx.__class__ is ast.Load:
            yield name


def is_inserted_call(node: ast.AST | None) -> bool:
    """Whether `node` is a call such as `__gemini__.on(x)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == RESERVED
    )


def is_inserted(unit: Unit, node: ast.AST | None) -> bool:
    """Whether `node` is such a call, or part of one, or what one has been put around."""
    if node is None:
        return False
    if isinstance(node, ast.Name) and node.id == RESERVED:
        return True
    return is_inserted_call(node) or is_inserted_call(unit.parent(node))
