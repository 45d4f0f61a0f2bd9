"""Node tensors: the inputs, outputs and model tensors (parameters, buffers, attributes) of a node."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gemini.capture.provenance import module_tensors
from gemini.ir.encode import follow
from gemini.ir.graph import Graph
from gemini.ir.interpreter import find_model_tensor
from gemini.ir.node import MODULES, Node
from gemini.ir.pytree import ModelObject, Ref, leaves

MODEL_TENSORS = ("parameter", "buffer", "attribute")


def model_tensors(graph: Graph, model: nn.Module, node: Node) -> list[torch.Tensor]:
    """Return the parameters, buffers and other model tensors that a node uses, each once."""
    found: dict[int, torch.Tensor] = {}
    owners = [
        leaf.module for form in (node.args, node.kwargs) for leaf in leaves(form) if isinstance(leaf, ModelObject)
    ]
    for name in (*owners, *((node.target,) if node.kind in MODULES else ())):
        module = model.get_submodule(name) if name else model
        for tensor in (*module.parameters(), *module.buffers()):
            found[id(tensor)] = tensor
        found.update((id(t), t) for t in _attribute_tensors(module))
    for name in node.uses:
        tensor = tensor_by_name(model, name)
        found[id(tensor)] = tensor
    for ref in node.inputs():
        source = graph.nodes[ref.node]
        if source.kind in MODEL_TENSORS:
            tensor = find_model_tensor(model, source.target)
            found[id(tensor)] = tensor
    return list(found.values())


def tensor_by_name(model: nn.Module, name: str) -> torch.Tensor:
    """Return the tensor of a dotted name."""
    return follow(model, tuple(("a", part) for part in name.partition("[")[0].split(".")))


def _attribute_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    plain = {path for path in module_tensors(module).values() if path}
    for path in plain:
        value = follow(module, tuple(("a", part) for part in path.split(".")))
        if isinstance(value, torch.Tensor):
            yield value


def tensor_inputs(node: Node) -> list[Ref]:
    """Return the values a node reads, each once, in order; not those of which it only reads the size."""
    found = [leaf for form in (node.args, node.kwargs) for leaf in leaves(form) if isinstance(leaf, Ref)]
    return list(dict.fromkeys(found))


def tensor_outputs(node: Node) -> list[Ref]:
    """Return the tensors a node produces, in order."""
    return [Ref(node.id, source, path) for source, path in node.outputs]


def value_size(graph: Graph, ref: Ref) -> int:
    """Return the bytes of a value."""
    meta = graph.nodes[ref.node].outputs.get((ref.source, ref.path))
    return 0 if meta is None else meta.numel * int(getattr(torch, meta.dtype).itemsize)


def values_size(graph: Graph, node: Node) -> int:
    """Return the bytes of a node's inputs and outputs, without model tensors."""
    inputs = [ref for ref in tensor_inputs(node) if graph.nodes[ref.node].kind not in MODEL_TENSORS]
    return sum(value_size(graph, ref) for ref in (*inputs, *tensor_outputs(node)))
