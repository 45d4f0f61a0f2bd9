"""Attribute writes: module attributes that the model's glue assigns during a forward.

    for layer in self.layers:
        layer.attention.mask = mask        a write before the layer runs
    self.state = state.detach()            a write at the end

A graph must repeat these: an opaque module, or the next call, may read the attribute. Writes of results of nodes,
sizes and None become nodes that call `assign`. A graph cannot recompute other values (a counter).

Where a graph runs in another process, writes that no node reads are returned instead (`return_attribute_writes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from gemini.ir.node import Node
from gemini.ir.pytree import Literal, SequenceForm
from gemini.ir.symint import TracedFloat, TracedInt

if TYPE_CHECKING:
    from gemini.ir.graph import Graph

ASSIGN = "gemini.capture.attribute_writes.assign"
RETURN_WRITE = "gemini.capture.attribute_writes.return_write"
_INTERNAL = frozenset(vars(nn.Module()))
_MISSING: Any = object()


def assign(module: nn.Module, name: str, value: torch.Tensor | int | float | None) -> None:
    """Set an attribute of a module."""
    setattr(module, name, value)


def return_write(module: str, name: str, value: Any) -> None:
    """Mark an attribute write that the graph returns in its result instead of executing it."""


class AttributeWrite(NamedTuple):
    """A module attribute that a run writes."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.module else self.name


def return_attribute_writes(graph: Graph) -> Graph:
    """Return the graph with the written attribute values in its result, beside the model's output.

    Writes that a node of the graph reads stay in place; so do writes of buffers.
    """
    read = {at for node in graph.nodes for at in node.after}
    writes = [node for node in graph.nodes if node.target == ASSIGN]
    used = {_write_of(node) for node in writes if node.id in read}
    last = {
        _write_of(node): node
        for node in writes
        if _write_of(node) not in used and not _is_buffer(graph, _write_of(node))
    }
    if not last:
        return graph
    nodes = list(graph.nodes)
    for node in writes:
        write = _write_of(node)
        if write in last:
            form = SequenceForm(tuple, (Literal(write.module), Literal(write.name), _value(node)))
            nodes[node.id] = replace(node, target=RETURN_WRITE, args=form, changes=())
    values = SequenceForm(tuple, tuple(_value(node) for node in last.values()))
    return replace(graph, nodes=nodes, result=SequenceForm(tuple, (graph.result, values)))


def returned_writes(graph: Graph) -> tuple[AttributeWrite, ...]:
    """Return the attributes whose values are in the result of a graph, in their order."""
    parts = [getattr(node.args, "items") for node in graph.nodes if node.target == RETURN_WRITE]  # noqa: B009
    found = (AttributeWrite(module.value, name.value) for module, name, _ in parts)
    return tuple(dict.fromkeys(found))


def _write_of(node: Node) -> AttributeWrite:
    owner, name, _ = getattr(node.args, "items")  # noqa: B009
    return AttributeWrite(owner.module, name.value)


def _value(node: Node) -> Any:
    return getattr(node.args, "items")[2]  # noqa: B009


def _is_buffer(graph: Graph, write: AttributeWrite) -> bool:
    return write.name in graph.bound_model().get_submodule(write.module)._buffers


class AttributeTracker:
    """Tracks the attributes of a model's modules, and which of them the glue has written since the last refresh."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.last = {id(module): _own(module) for module in model.modules()}
        self.touched: set[tuple[int, str]] = set()  # also writes of an equal value

    def refresh(self, module: nn.Module | None) -> None:
        """Record the current attributes of a module and its children after a run, which may have changed them."""
        for part in module.modules() if module is not None else ():
            self.last[id(part)] = _own(part)

    def writes_since(self, module: nn.Module, touched: bool) -> Iterator[tuple[str, str, Any, bool]]:
        """Yield (module, attribute, value, whether it changed) of the glue's writes to a module or its children.

        With `touched`, also writes of an equal value: the module itself may change the attribute by the next call.
        """
        for part in module.modules():
            name, before = self.names.get(id(part)), self.last.get(id(part), {})
            if name is None:
                continue
            for key, value in _own(part).items():
                changed = value is not before.get(key, _MISSING) and not _equal(value, before.get(key, _MISSING))
                if changed or (touched and (id(part), key) in self.touched):
                    self.touched.discard((id(part), key))
                    before[key] = value
                    yield name, key, value, changed


def _own(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {key: value for key, value in vars(module).items() if key not in _INTERNAL}
    found.update(module._buffers)
    return found


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, _PLAIN) and bool(a == b)


def can_assign(value: Any, changed: bool) -> bool:
    """Return whether a graph can repeat a write. A plain value that changed may change in every call."""
    if isinstance(value, (TracedInt, TracedFloat)):
        return True
    if isinstance(value, _PLAIN):
        return not changed
    return value is None or (isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter))


_PLAIN = (bool, int, float, str)
