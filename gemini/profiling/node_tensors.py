"""Held tensors: the parameters, buffers and other tensors of the model that a node uses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gemini.capture.provenance import own_tensors
from gemini.ir.encode import follow
from gemini.ir.graph import Graph
from gemini.ir.interpreter import get_held
from gemini.ir.node import MODULES, Node
from gemini.ir.pytree import Owned, Ref, leaves

HELD = ("parameter", "buffer", "attribute")


def held_tensors(graph: Graph, model: nn.Module, node: Node) -> list[torch.Tensor]:
    """The parameters, buffers and other tensors of a model that a node uses, each once."""
    found: dict[int, torch.Tensor] = {}
    owners = [leaf.module for form in (node.args, node.kwargs) for leaf in leaves(form) if isinstance(leaf, Owned)]
    for name in (*owners, *((node.target,) if node.kind in MODULES else ())):
        module = model.get_submodule(name) if name else model
        for tensor in (*module.parameters(), *module.buffers()):
            found[id(tensor)] = tensor
        found.update((id(t), t) for t in _attributes(module))
    for name in node.uses:
        tensor = follow_name(model, name)
        found[id(tensor)] = tensor
    for ref in node.inputs():
        source = graph.nodes[ref.node]
        if source.kind in HELD:
            tensor = get_held(model, source.target)
            found[id(tensor)] = tensor
    return list(found.values())


def follow_name(model: nn.Module, name: str) -> torch.Tensor:
    """The tensor of a dotted name."""
    return follow(model, tuple(("a", part) for part in name.partition("[")[0].split(".")))


def _attributes(module: nn.Module) -> Iterator[torch.Tensor]:
    plain = {path for path in own_tensors(module).values() if path}
    for path in plain:
        value = follow(module, tuple(("a", part) for part in path.split(".")))
        if isinstance(value, torch.Tensor):
            yield value


def tensor_inputs(node: Node) -> list[Ref]:
    """The values a node reads as such, each once, in order; not those it only asks for their size."""
    found = [leaf for form in (node.args, node.kwargs) for leaf in leaves(form) if isinstance(leaf, Ref)]
    return list(dict.fromkeys(found))


def tensor_outputs(node: Node) -> list[Ref]:
    """The tensors a node makes, in order."""
    return [Ref(node.id, source, path) for source, path in node.outputs]


def value_size(graph: Graph, ref: Ref) -> int:
    """The bytes of a value."""
    meta = graph.nodes[ref.node].outputs.get((ref.source, ref.path))
    return 0 if meta is None else meta.numel * int(getattr(torch, meta.dtype).itemsize)


def values_size(graph: Graph, node: Node) -> int:
    """The bytes of what a node reads and makes, without tensors of the model."""
    inputs = [ref for ref in tensor_inputs(node) if graph.nodes[ref.node].kind not in HELD]
    return sum(value_size(graph, ref) for ref in (*inputs, *tensor_outputs(node)))
