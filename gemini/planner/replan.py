"""Replanning with the measured times of a plan.

A profile is measured in one process; workers have other cores, caches and neighbours. If a worker is busy for longer
than planned, the costs of the nodes of its stages are scaled by the measured times of their actions, and partition and
schedule are searched again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan
    from gemini.profiling.node_costs import NodeCost
    from gemini.profiling.profile_result import Profile
    from gemini.schedule.schedplan import SchedPlan


def imbalance_ms(plan: StepPlan) -> float:
    """Return how much shorter a step would be if its busiest worker had its planned share of the work."""
    planned, measured = _busy_ms(plan.schedule), _busy_ms(plan.expected)
    return max(measured) - max(planned) / sum(planned) * sum(measured)


def _busy_ms(plan: SchedPlan) -> list[float]:
    """Return the compute time per worker."""
    return [float(sum(block.span for block in plan.device_blocks(device))) for device in range(plan.ndevs)]


def apply_measured_times(plan: StepPlan) -> Profile:
    """Return the profile with node times scaled by the measured times of their stages."""
    planned, measured, stage_of = _spans(plan.schedule), _spans(plan.expected), plan.partition.stage_of

    def ratio(node: NodeCost, *btypes: str) -> float:
        keys = [key for one in btypes if (key := (stage_of[node.id], one)) in planned]
        expected, took = sum(planned[key] for key in keys), sum(measured[key] for key in keys)
        return took / expected if expected > 0 else 1.0

    def scale(node: NodeCost) -> NodeCost:
        if node.id not in stage_of:
            return node
        back, share = ratio(node, BACKWARD, INPUT_GRADIENT), node.weight_share
        if share:
            weight = share * ratio(node, BACKWARD, WEIGHT_GRADIENT)
            back = weight + (1 - share) * back
            share = weight / back
        forward_ms, backward_ms = node.forward_ms * ratio(node, FORWARD), node.backward_ms * back
        return replace(node, forward_ms=forward_ms, backward_ms=backward_ms, weight_share=share)

    return replace(plan.profile, nodes=tuple(map(scale, plan.profile.nodes)))


def _spans(plan: SchedPlan) -> dict[tuple[int, str], float]:
    """Return the time per stage and action type; it is the same for all micro-batches."""
    return {(block.stage or 0, block.btype): float(block.span) for block in plan}
