"""Graph summary: nodes, opaque regions with reasons, and checks, as text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from gemini.ir.equivalence import layer_classes, node_classes

if TYPE_CHECKING:
    from gemini.ir.graph import Graph


def summarize(graph: Graph) -> str:
    """Return the summary of a graph."""
    kinds = Counter(node.kind for node in graph.nodes)
    lines = [
        f"{graph.model_name}: {len(graph.compute_nodes)} nodes "
        f"({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})"
    ]
    if graph.is_whole:
        lines.append(f"  cannot be partitioned: {graph.blocks['']}")
    classes = node_classes(graph)
    lines.append(f"  {len(classes)} classes of equivalent nodes")
    for scopes in layer_classes(graph)[:4]:
        lines.append(f"  {len(scopes)} equivalent layers: {scopes[0]} … {scopes[-1]}")
    lines.append(f"  batch: {_batch(graph)}")
    lines += [f"  opaque: {name or 'the model'} — {why}" for name, why in {**graph.blocks, **graph.calls}.items()]
    data = [guard for guard in graph.guards if guard.data]
    if data:
        lines.append(f"  {len(data)} guards on contents, checked in every run:")
        lines += [f"    {guard}" for guard in data[:8]]
    lines += [f"  checked on {what}: {extent}" for what, extent in graph.checked.items()]
    return "\n".join(lines)


def _batch(graph: Graph) -> str:
    if graph.batch_size is None:
        return "this size only"
    inputs = []
    for node in graph.nodes:
        if node.kind == "input":
            meta = next(iter(node.outputs.values()))
            inputs.append(f"{node.target} {'none' if meta.batch_dim is None else meta.batch_dim}")
    return f"{graph.batch_size} samples; dimension of each input: {', '.join(inputs)}"
