"""Looking for names cheaply: by how they may be spelled first, by what they mean second.

Resolving a name costs much more than reading it. A pass that wants `torch.device` needs to resolve only what ends in
`device`, and the names that this file gives to something that does:

    from torch import device as D        D
    make = torch.device                  make
    from mine import Place               Place, whatever that module calls so
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set

from gemini.instrument.passes.pass_input import Unit


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
