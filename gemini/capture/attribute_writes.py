"""Assignments: attributes of modules that the model's glue sets while it runs.

    for layer in self.layers:
        layer.attention.mask = mask        an assignment, before the layer runs
    self.state = state.detach()            an assignment, at the end

A graph must repeat these: a module kept whole reads its attribute, and the next call may. Tensors that nodes made,
sizes and None are written down as nodes that call `assign`. Other values (a counter) a graph cannot compute again.

Where a graph runs far from the model, attributes that nothing in it reads are better returned than set: `return_attribute_writes`.
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
    """An attribute of a module would be set; whoever runs the graph finds the value in its result."""


class AttributeWrite(NamedTuple):
    """An attribute that a run leaves behind."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.module else self.name


def return_attribute_writes(graph: Graph) -> Graph:
    """The graph with the values of the attributes that it leaves in its result, beside the model's output.

    Attributes that something in the graph reads stay as they are; so do buffers, which are tensors that the model has.
    """
    read = {at for node in graph.nodes for at in node.after}
    sets = [node for node in graph.nodes if node.target == ASSIGN]
    seen = {_write_of(node) for node in sets if node.id in read}
    last = {
        _write_of(node): node for node in sets if _write_of(node) not in seen and not _is_buffer(graph, _write_of(node))
    }
    if not last:
        return graph
    nodes = list(graph.nodes)
    for node in sets:
        left = _write_of(node)
        if left in last:
            form = SequenceForm(tuple, (Literal(left.module), Literal(left.name), _value(node)))
            nodes[node.id] = replace(node, target=RETURN_WRITE, args=form, changes=())
    values = SequenceForm(tuple, tuple(_value(node) for node in last.values()))
    return replace(graph, nodes=nodes, result=SequenceForm(tuple, (graph.result, values)))


def returned_writes(graph: Graph) -> tuple[AttributeWrite, ...]:
    """The attributes whose values are in the result of a graph, in their order."""
    parts = [getattr(node.args, "items") for node in graph.nodes if node.target == RETURN_WRITE]  # noqa: B009
    found = (AttributeWrite(module.value, name.value) for module, name, _ in parts)
    return tuple(dict.fromkeys(found))


def _write_of(node: Node) -> AttributeWrite:
    owner, name, _ = getattr(node.args, "items")  # noqa: B009
    return AttributeWrite(owner.module, name.value)


def _value(node: Node) -> Any:
    return getattr(node.args, "items")[2]  # noqa: B009


def _is_buffer(graph: Graph, left: AttributeWrite) -> bool:
    return left.name in graph.bound_model().get_submodule(left.module)._buffers


class AttributeTracker:
    """The attributes of a model's modules as last seen, and those that the glue has set since."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.last = {id(module): _own(module) for module in model.modules()}
        self.touched: set[tuple[int, str]] = set()  # also those set to the value they had

    def see(self, module: nn.Module | None) -> None:
        """Take the attributes of a module and its children as they are now: its own run may have changed them."""
        for part in module.modules() if module is not None else ():
            self.last[id(part)] = _own(part)

    def assigned_since(self, module: nn.Module, touched: bool) -> Iterator[tuple[str, str, Any, bool]]:
        """(module, attribute, value, whether another) of what the glue has set in a module or its children.

        With `touched`, also where the value is the same: the module itself may have changed it by the next call.
        """
        for part in module.modules():
            name, before = self.names.get(id(part)), self.last.get(id(part), {})
            if name is None:
                continue
            for key, value in _own(part).items():
                other = value is not before.get(key, _MISSING) and not _equal(value, before.get(key, _MISSING))
                if other or (touched and (id(part), key) in self.touched):
                    self.touched.discard((id(part), key))
                    before[key] = value
                    yield name, key, value, other


def _own(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {key: value for key, value in vars(module).items() if key not in _INTERNAL}
    found.update(module._buffers)
    return found


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, _PLAIN) and bool(a == b)


def can_assign(value: Any, other: bool) -> bool:
    """Whether a graph can set an attribute to a value. A plain one that changed may be another each time."""
    if isinstance(value, (TracedInt, TracedFloat)):
        return True
    if isinstance(value, _PLAIN):
        return not other
    return value is None or (isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter))


_PLAIN = (bool, int, float, str)
