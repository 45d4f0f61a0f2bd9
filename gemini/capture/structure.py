"""Structure: which nodes and layers of a graph are alike.

Two nodes are alike if they compute the same function of the same sizes: the same op or module class with the same
parameter shapes and settings, plain arguments, region, input and output sizes. Alike nodes are profiled once. A
*layer* is an open module; layers whose nodes are alike one by one are one class of layer.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from torch import nn

from gemini.capture.forms import Literal, Ref, leaves

if TYPE_CHECKING:
    from gemini.capture.graph import Graph
    from gemini.capture.node import Node

_PLAIN = (bool, int, float, str, type(None), tuple)


def node_signature(graph: Graph, node: Node) -> str:
    """A short text that is equal for alike nodes."""
    facts: list[Any] = [node.kind, node.region, node.checkpoint, node.sketch]
    facts += [
        graph.meta(ref) if isinstance(ref, Ref) else _value(ref)
        for form in (node.args, node.kwargs)
        for ref in leaves(form)
    ]
    facts += sorted((source, str(path), meta) for (source, path), meta in node.outputs.items())
    facts += _module_facts(graph.model, node) if node.kind in ("module", "block") else [node.target]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _value(form: Any) -> Any:
    return repr(form.value) if isinstance(form, Literal) else type(form).__name__


def _module_facts(model: nn.Module | None, node: Node) -> list[Any]:
    if model is None:  # without the model, what is recorded must do
        return [node.cls]
    module = model.get_submodule(node.target) if node.target else model
    facts: list[Any] = []
    for name, part in module.named_modules():
        plain = sorted(
            (k, v) for k, v in vars(part).items() if isinstance(v, _PLAIN) and not k.endswith(("idx", "index", "id"))
        )
        facts.append((name, type(part).__qualname__, repr(plain)))
    facts += [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    return facts


def node_classes(graph: Graph) -> dict[str, list[int]]:
    """Alike nodes together, in order of first appearance."""
    found: dict[str, list[int]] = {}
    for node in graph.compute_nodes:
        found.setdefault(node_signature(graph, node), []).append(node.id)
    return found


def layer_classes(graph: Graph) -> list[list[str]]:
    """Groups of two or more alike layers, the largest layers first; layers inside a grouped layer are left out."""
    signatures = {node.id: node_signature(graph, node) for node in graph.compute_nodes}
    contents: dict[str, list[str]] = {}
    for node in graph.compute_nodes:
        for scope in node.scope:
            contents.setdefault(scope, []).append(signatures[node.id])
        if node.kind == "block":
            contents.setdefault(node.target, []).append(signatures[node.id])
    groups: dict[tuple[str, ...], list[str]] = {}
    for scope, inside in contents.items():
        groups.setdefault(tuple(inside), []).append(scope)
    found = sorted((g for g in groups.items() if len(g[1]) > 1), key=lambda group: -len(group[0]) * len(group[1]))
    taken: list[str] = []
    kept = []
    for _, scopes in found:
        if any(scope == one or scope.startswith(f"{one}.") for scope in scopes for one in taken):
            continue
        taken += scopes
        kept.append(scopes)
    return kept
