"""Common subexpressions: nodes of a trace that must return the same value.

A loop over samples that makes a table per sample (`arange(h)` …) repeats the same table. Nodes that use random
numbers, write, or read written memory are never merged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gemini.ir.node import Node
from gemini.ir.pytree import Ref


def representatives(nodes: Sequence[Node]) -> list[int]:
    """Return, for every node, the first equivalent node, usually itself."""
    written = {root for node in nodes for ref in node.mutates for root in memory_makers(nodes, ref.node)}
    first: dict[str, int] = {}
    found: list[int] = []
    for node in nodes:
        if _is_repeatable(node) and not _reads_memory(nodes, node, written):
            found.append(first.setdefault(_text(_facts(node), found), node.id))
        else:
            found.append(node.id)
    return found


def memory_makers(nodes: Sequence[Node], index: int) -> set[int]:
    """Return the nodes that allocated the memory of a node's results, itself included."""
    return {index, *nodes[index].shares}


def _is_repeatable(node: Node) -> bool:
    plain = node.kind == "op" and not (node.random or node.mutates or node.after or node.changes)
    return plain and bool(node.outputs) and all(source == "ret" for source, _ in node.outputs)


def _reads_memory(nodes: Sequence[Node], node: Node, written: set[int]) -> bool:
    read = {node.id, *(ref.node for ref in node.inputs())}
    return any(memory_makers(nodes, index) & written for index in read)


def _facts(node: Node) -> tuple[Any, ...]:
    return node.target, node.region, node.args, node.kwargs, node.out_spec


def _text(value: Any, names: Sequence[int]) -> str:
    """Return a value as text in which equivalent nodes have one name."""
    if isinstance(value, Ref):
        return f"%{names[value.node]} {value.source} {value.path!r}"
    if isinstance(value, np.ndarray):
        return f"array {value.shape} {value.dtype} {value.tobytes().hex()}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({','.join(_text(part, names) for part in value)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (_text(getattr(value, part.name), names) for part in dataclasses.fields(value))
        return f"{type(value).__name__}({','.join(parts)})"
    return repr(value)
