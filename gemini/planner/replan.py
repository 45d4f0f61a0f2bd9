"""Experience: a plan made again from what actions took in its steps.

A profile is of one process; workers have other cores, caches and neighbours. Where one of them is busy for longer than
the others, and was not planned to be, the nodes of its stages are taken to cost as much more as their actions did, and
stages and schedule are chosen anew: work goes to those who wait.
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
    """How much shorter a step would be if its busiest worker had no larger share of the work than planned."""
    planned, measured = _busy_ms(plan.schedule), _busy_ms(plan.expected)
    return max(measured) - max(planned) / sum(planned) * sum(measured)


def _busy_ms(plan: SchedPlan) -> list[float]:
    """How long every worker computes."""
    return [float(sum(block.span for block in plan.device_blocks(device))) for device in range(plan.ndevs)]


def apply_measured_times(plan: StepPlan) -> Profile:
    """The profile with nodes that take as much longer as the actions of their stages did."""
    planned, measured, stage_of = _spans(plan.schedule), _spans(plan.expected), plan.partition.stage_of

    def ratio(node: NodeCost, *btypes: str) -> float:
        keys = [key for one in btypes if (key := (stage_of[node.id], one)) in planned]
        expected, took = sum(planned[key] for key in keys), sum(measured[key] for key in keys)
        return took / expected if expected > 0 else 1.0

    def again(node: NodeCost) -> NodeCost:
        if node.id not in stage_of:
            return node
        back, share = ratio(node, BACKWARD, INPUT_GRADIENT), node.weight_share
        if share:
            weight = share * ratio(node, BACKWARD, WEIGHT_GRADIENT)
            back = weight + (1 - share) * back
            share = weight / back
        forward_ms, backward_ms = node.forward_ms * ratio(node, FORWARD), node.backward_ms * back
        return replace(node, forward_ms=forward_ms, backward_ms=backward_ms, weight_share=share)

    return replace(plan.profile, nodes=tuple(map(again, plan.profile.nodes)))


def _spans(plan: SchedPlan) -> dict[tuple[int, str], float]:
    """What actions take, by stage and type: the same for all micro-batches."""
    return {(block.stage or 0, block.btype): float(block.span) for block in plan}
