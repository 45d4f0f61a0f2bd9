"""Shard stages: the plan of a step with every stage divided over several workers.

    StepPlan ─► plan_shards ─► local graph ─► stages of a shard ─► slices of the random numbers
                layouts        local ops      generated source     masks of one device

A model that cannot be divided keeps its plan, with each stage on the first worker of its group, or runs in the
controller where it has a single stage; `unsharded_reason` tells the user why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gemini.errors import GenerateError, PartitionError, ShardingError
from gemini.ir.call_binding import ModelCall
from gemini.ir.interpreter import GuardBroken
from gemini.planner.buffer_writes import find_written_buffers
from gemini.planner.microbatch_split import slice_call
from gemini.planner.rng_analysis import record_node_rng
from gemini.planner.shard_memory import add_shard_memory
from gemini.planner.shard_sizes import Patterns, find_layouts, slice_patterns
from gemini.planner.step_plan import StepPlan, UnplannableError
from gemini.random_numbers.random_ops import UnsliceableRandomOp
from gemini.random_numbers.rng_recorder import RandomOpPattern, match_patterns
from gemini.schedule.user_plan import group_size
from gemini.tensor_parallel.shard_costs import ShardCosts
from gemini.tensor_parallel.shard_options import ShardOptions, UnknownScopeError, read_overrides
from gemini.tensor_parallel.shard_plan import ShardPlan
from gemini.tensor_parallel.shard_planner import plan_shards

if TYPE_CHECKING:
    from gemini.planner.plan_request import PlanRequest

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def divide_stages(plan: StepPlan, args: tuple[Any, ...], kwargs: dict[str, Any], request: PlanRequest) -> StepPlan:
    """Return the plan with its stages on `request.shards` workers each; raises UnplannableError for a single stage."""
    if not request.divides:
        return plan
    reason = _find_obstacle(plan)
    if not reason:
        try:
            return _divide(plan, (args, kwargs), request)
        except UnknownScopeError:
            raise
        except (ShardingError, GenerateError, PartitionError, UnplannableError) as error:
            reason = str(error).partition("\n")[0]
    if plan.nstages == 1 or plan.has_groups:
        count = max(request.shards, group_size(plan.schedule))
        raise UnplannableError(f"its operators cannot be divided over {count} workers: {reason}")
    return replace(plan, unsharded_reason=reason)


def _find_obstacle(plan: StepPlan) -> str:
    if plan.graph.rolled:
        return "it loops over samples"
    devices = {str(tensor.device.type) for tensor in plan.graph.bound_model().parameters()}
    return f"shards are processes on CPUs, and it is on {min(devices - {'cpu'})}" if devices - {"cpu"} else ""


def _divide(plan: StepPlan, call: Arguments, request: PlanRequest) -> StepPlan:
    size = max(request.shards, group_size(plan.schedule))
    options = ShardOptions(dim=request.sharding_dim, overrides=read_overrides(request.sharding_overrides))
    known, varying = find_layouts(plan, request.earlier_plans, size)
    shards = known or plan_shards(plan.graph, size, options, single=_single_nodes(plan), whole=varying)
    if not shards.sharded_share and not plan.has_groups:
        why = "".join(f" ({op.name}: {op.reason})" for op in shards.replicated[:1])
        raise ShardingError(f"none of its parameters can be divided{why}")
    plan = replace(plan, node_rng=record_divided_rng(plan, call))
    patterns = slice_patterns(plan, shards)
    _check_patterns(plan, patterns)
    analysis = add_shard_memory(plan, shards)
    exchanges_ms = _exchanges_ms(shards, plan.micro_batches) / plan.nstages
    analysis = replace(analysis, step_ms=analysis.step_ms * _work_share(plan, shards) + exchanges_ms)
    divided = replace(plan, shards=shards, analysis=analysis, rng_patterns=patterns, _built={})
    divided.build()
    return replace(divided, buffers_written_once=find_written_buffers(divided))


def _single_nodes(plan: StepPlan) -> frozenset[int]:
    """Return the nodes of stages that the schedule puts on one device, where it puts others on several."""
    return frozenset(node for stage in plan.single_stages for node in plan.partition.stages[stage])


def _work_share(plan: StepPlan, shards: ShardPlan) -> float:
    """Return the work of a shard, as a share of that of the whole model."""
    whole = own = 0.0
    for cost in plan.profile.nodes:
        work = cost.forward_ms + cost.backward_ms
        whole += work
        own += work if shards.node(cost.id).is_replicated else work / shards.size
    return own / whole if whole else 1.0


def _exchanges_ms(shards: ShardPlan, micro_batches: int) -> float:
    """Return the time of all collectives of a step."""
    costs = ShardCosts()
    return sum(
        costs.collective_ms(one.name, one.size, shards.size) * (1 if one.phase == "step" else micro_batches)
        for one in shards.collectives()
    )


def record_divided_rng(plan: StepPlan, call: Arguments) -> dict[int, tuple[RandomOpPattern, ...]]:
    """Return the random numbers of every node, as a call shows them."""
    if not any(node.random for node in plan.graph.nodes):
        return {}
    size = plan.batch.count_samples(ModelCall(*call).tensors) or 1
    more, fewer = (3, 2) if size > 2 else (2, 1) if size == 2 else (1, 1)
    calls = [call if size == 1 else slice_call(*call, plan.batch, 0, count) for count in (more, fewer)]
    piped = plan.build() if plan.shards is None else replace(plan, shards=None, resized_from=None, _built={}).build()
    try:
        first, second = (record_node_rng(piped, one) for one in calls)
        return {at: tuple(match_patterns(found, more, second[at], fewer)) for at, found in first.items()}
    except (UnsliceableRandomOp, GuardBroken) as error:
        raise UnplannableError(f"its random numbers cannot be divided: {error}") from error


def _check_patterns(plan: StepPlan, patterns: Patterns) -> None:
    known = len(patterns) if plan.tail is None else plan.nstages  # those of a tail are not sliced by samples
    if plan.node_rng and not plan.single_micro_batch_reason and (
        _plain(patterns[:known]) != _plain(plan.rng_patterns[:known])
    ):  # fmt: skip
        raise UnplannableError("its random numbers differ between two runs")


def _plain(patterns: Patterns) -> list[list[Any]]:
    return [[(one.name, one.shape, one.dim, one.factor) for one in stage] for stage in patterns]
