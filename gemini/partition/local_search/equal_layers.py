"""Equal layers: as many layers a stage as there are to share out, an answer that others must not be worse than.

Layers are the numbered modules in the names of items, outermost ones (`encoder.layer.3`).
"""

from __future__ import annotations

from gemini.partition.local_search.score import Answer, judge
from gemini.partition.partition_problem import Problem


def equal_layers(problem: Problem) -> list[Answer]:
    """The answer, if there are layers enough and pins allow it."""
    layer_of = [_layer(item.name) for item in problem.items]
    layers = [layer for layer in dict.fromkeys(layer_of) if layer]
    if len(layers) < problem.nparts:
        return []
    stage_of_layer = {layer: at * problem.nparts // len(layers) for at, layer in enumerate(layers)}
    stage_of: list[int] = []
    for at, layer in enumerate(layer_of):
        before = [stage_of[other] for other in problem.predecessors[at]]
        stage_of.append(max([stage_of_layer.get(layer, 0), *before]))
    if any(item.pin not in (None, stage) for item, stage in zip(problem.items, stage_of, strict=True)):
        return []
    return [judge(problem, stage_of, range(problem.nparts), "equal layers")]


def _layer(name: str) -> str:
    parts = name.split(".")
    numbered = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return "" if numbered is None else ".".join(parts[: numbered + 1])
