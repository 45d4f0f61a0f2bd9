"""Held tensors: the parameters, buffers and other tensors of the model that a node uses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gemini.capture.provenance import get_held, own_tensors
from gemini.ir.encode import follow
from gemini.ir.graph import Graph
from gemini.ir.node import MODULES, Node
from gemini.ir.pytree import Owned, leaves

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
