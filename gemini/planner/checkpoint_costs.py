"""Checkpoint costs: a profile in which the nodes inside activation checkpoints of the model run again in backward.

Nodes are timed alone. Those of a checkpoint retain only what comes from before it; in the backward of a node all that
it and earlier nodes of the checkpoint need is there again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.profiling.node_costs import NodeCost
    from gemini.profiling.profile_result import Profile


def add_recomputation(profile: Profile, graph: Graph) -> Profile:
    """Return the profile with the costs of the checkpoints whose inside the graph records."""
    parts: dict[int, list[NodeCost]] = defaultdict(list)
    for cost in profile.nodes:
        if number := graph.nodes[cost.id].recomputed:
            parts[number].append(cost)
    changed = {one.id: one for part in parts.values() for one in _recompute(part, profile.values_mb)}
    return replace(profile, nodes=tuple(changed.get(cost.id, cost) for cost in profile.nodes)) if changed else profile


def _recompute(part: list[NodeCost], values_mb: tuple[float, ...]) -> list[NodeCost]:
    made = {value for cost in part for value in cost.output_values if value not in cost.input_values}
    found, again, held = [], set[int](), 0.0
    for cost in part:
        if not cost.backward_ms:
            found.append(cost)
            continue
        new = (made & set(cost.saved_values)) - again
        again |= new
        held += cost.saved_own_mb + sum(values_mb[value] for value in new)
        outside = tuple(value for value in cost.saved_values if value not in made)
        found.append(
            replace(
                cost,
                recomputed=True,
                backward_ms=cost.backward_ms + cost.forward_ms,
                flops=cost.flops + cost.forward_flops,
                moved_mb=cost.moved_mb + cost.forward_moved_mb,
                backward_peak_mb=max(cost.forward_peak_mb, cost.backward_peak_mb) + held,
                saved_mb=sum(values_mb[value] for value in outside),
                saved_own_mb=0.0,
                saved_values=outside,
            )
        )
    return found
