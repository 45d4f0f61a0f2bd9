"""Pinning: the inputs whose contents a branch of the model's Python depends on.

Where these have the contents that they had in a recording, the branch goes the way it went there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemini.capture.concretize import data_refs
from gemini.capture.cse import memory_of
from gemini.ir.node import Node
from gemini.ir.pytree import Ref


def causes_of(nodes: Sequence[Node], refs: Iterable[Ref]) -> set[int]:
    """The nodes whose contents some values follow from, those that wrote to them included."""
    writers: dict[int, set[int]] = {}
    for node in nodes:
        for ref in node.mutates:
            for root in memory_of(nodes, ref.node):
                writers.setdefault(root, set()).add(node.id)
    found: set[int] = set()
    waiting = [ref.node for ref in refs]
    while waiting:
        node = nodes[waiting.pop()]
        if node.id not in found:
            found.add(node.id)
            waiting += [ref.node for form in (node.args, node.kwargs) for ref in data_refs(form, {})]
            waiting += [writer for root in memory_of(nodes, node.id) for writer in writers.get(root, ())]
    return found


def inputs_of(nodes: Sequence[Node], refs: Iterable[Ref]) -> set[int] | None:
    """The inputs that some values follow from, by ops and functions alone; None where more is needed: a buffer, say."""
    causes = [nodes[index] for index in causes_of(nodes, refs)]
    written = {root for node in causes for ref in node.mutates for root in memory_of(nodes, ref.node)}
    if any(node.is_source and (node.kind != "input" or node.id in written) for node in causes):
        return None
    if not all(node.is_source or _computes(node) for node in causes):
        return None
    return {node.id for node in causes if node.kind == "input"}


def _computes(node: Node) -> bool:
    """Whether a node makes its result of its arguments alone: an op, or a function kept whole that takes no weights."""
    if node.random or node.changes:
        return False
    return node.kind == "op" or (node.kind == "call" and not node.uses)
