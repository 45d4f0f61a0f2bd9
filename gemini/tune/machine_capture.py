"""Machine capture: the costs of a model on the workers of this machine, from a capture or from the plan of a step."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gemini.batch_analysis.batchnorm import uses_batch_statistics
from gemini.errors import GeminiError, ProfileError
from gemini.planner.plan_request import PlanRequest
from gemini.planner.schedule_choice import ACTION_MS, step_overhead_ms
from gemini.profiling.node_tensors import tensor_inputs, value_size
from gemini.tensor_parallel.shard_planner import plan_shards
from gemini.tune.machine_costs import MachineCosts, NodeShare, NodeTime
from gemini.tune.model_capture import count_samples

if TYPE_CHECKING:
    from torch import nn

    from gemini.ir.graph import Graph
    from gemini.planner.step_plan import StepPlan
    from gemini.profiling.node_costs import NodeCost
    from gemini.profiling.profile_result import Profile

_MEGA = 2.0**20
_PARTS = 4  # the smaller batch is this part of the larger one
_FIXED_S = 8e-6  # of a node, where only one size was measured
_WEIGHT_SHARE = 0.5  # of a backward, where it was not measured
_UPDATED = 1 << 22  # elements of the trial update
_STATISTICS = "batch normalization in training takes statistics over the batch"
_UNDIVIDED = "none of its parameters can be divided"


def capture_machine_costs(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, workers: int = 2
) -> MachineCosts:
    """Capture a model on one batch and measure its nodes as a worker runs them, on two sizes where that is possible."""
    from gemini.capture import capture
    from gemini.planner.microbatch_split import find_batch_dims, slice_call
    from gemini.planner.step_planner import profile_micro_batch

    kwargs = kwargs or {}
    if not any(one.requires_grad for one in model.parameters()):
        raise ProfileError("none of its parameters has a gradient: there is nothing to train\n    → unfreeze some")
    alone = _time_step(model, args, kwargs)
    graph = capture(model, args, kwargs)
    cores = len(os.sched_getaffinity(0))
    request = PlanRequest(min(workers, cores), 1, threads=max(1, cores // workers))
    samples = count_samples(graph)
    profiles = {samples: profile_micro_batch(graph, args, kwargs, request)}
    batch = find_batch_dims(model, args, kwargs)
    if batch is not None and batch.size >= _PARTS:
        small = batch.size // _PARTS
        try:
            call = slice_call(args, kwargs, batch, 0, small)
            profiles[small] = profile_micro_batch(graph, *call, request)
        except GeminiError:  # its graph is for this size only
            pass
    costs = _machine_costs(graph, profiles, workers, alone / samples)
    coupled = any(uses_batch_statistics(module) for module in model.modules())
    return replace(costs, coupled=_STATISTICS) if coupled else costs


def plan_costs(plan: StepPlan, workers: int, alone: float) -> MachineCosts:
    """Return the costs of a planned model; `alone`: seconds of its step in this process."""
    from gemini.planner.step_planner import scale_to_batch

    samples = max(1, round(plan.batch.size / plan.captured_parts))
    profiles = {samples: scale_to_batch(plan.profile, 1 / plan.captured_parts)}
    return _machine_costs(plan.graph, profiles, workers, alone / plan.batch.size)


def _machine_costs(graph: Graph, profiles: Mapping[int, Profile], workers: int, alone: float) -> MachineCosts:
    sizes = min(profiles), max(profiles)
    early, late = (list(profiles[size]) for size in sizes)
    shares: dict[int, dict[int, NodeShare]] = {}
    summed: dict[int, float] = {}
    undivided: dict[int, str] = {}
    for size in (size for size in range(2, workers + 1) if workers % size == 0):
        try:
            shares[size], summed[size] = _node_shares(graph, size)
        except GeminiError as error:
            undivided[size] = str(error).partition("\n")[0]
    crossing = _crossing_bytes(graph, [cost.id for cost in late])
    owned: set[str] = set()
    chain = []
    profile = profiles[sizes[1]]
    for at, (small, large) in enumerate(zip(early, late, strict=True)):
        fresh = set(large.parameters) - owned
        owned |= fresh
        chain.append(
            NodeTime(
                large.name,
                _two_times(small.forward_ms, large.forward_ms, sizes),
                _two_times(small.backward_ms, large.backward_ms, sizes),
                _weight_share(large),
                sum(profile.parameters_mb[name] for name in fresh) * _MEGA / 4,
                profile.saved_mb([large]) * _MEGA,
                crossing[at],
                large.forward_flops or large.flops / 3,
                {size: known.get(large.id, NodeShare(1.0)) for size, known in shares.items()},
            )
        )
    parameters = sum(one.numel() for one in graph.bound_model().parameters() if one.requires_grad)
    measured: tuple[float, float] = sizes if len(profiles) > 1 else (sizes[1] / 2, sizes[1])
    return MachineCosts(
        profile.model, tuple(chain), measured, parameters, alone, ACTION_MS / 1e3, step_overhead_ms(graph) / 1e3,
        _update_seconds(parameters), summed, undivided,
    )  # fmt: skip


def _two_times(small: float, large: float, sizes: tuple[int, int]) -> tuple[float, float]:
    """Return seconds on both sizes; from one reading on one size, that of half of it as well."""
    if sizes[0] != sizes[1]:
        return small / 1e3, large / 1e3
    seconds = large / 1e3
    fixed = min(_FIXED_S, seconds)
    return fixed + (seconds - fixed) / 2, seconds


def _weight_share(cost: NodeCost) -> float:
    if not cost.parameter_mb:
        return 0.0
    return _WEIGHT_SHARE if cost.weight_share is None else cost.weight_share


def _node_shares(graph: Graph, size: int) -> tuple[dict[int, NodeShare], float]:
    """Return what every node costs on one of `size` shards, and the bytes that they sum once per step."""
    from gemini.errors import ShardingError

    plan = plan_shards(graph, size)
    if not plan.sharded_share:
        raise ShardingError(_UNDIVIDED)
    nbytes: dict[int, float] = defaultdict(float)
    exchanges: dict[int, int] = defaultdict(int)
    last, whole = max(node.id for node in graph.compute_nodes), 2 * (size - 1) / size
    summed = 0.0
    for one in plan.collectives():
        if one.phase == "step":
            summed += one.size
            continue
        at = one.node if one.node >= 0 else last
        nbytes[at] += one.wire / whole
        exchanges[at] += 1
    return {
        node.id: NodeShare(
            1.0 if plan.node(node.id).is_replicated else 1 / size, nbytes[node.id], exchanges[node.id]
        )
        for node in graph.compute_nodes
    }, summed  # fmt: skip


def _crossing_bytes(graph: Graph, order: Sequence[int]) -> list[float]:
    """Return for every node the bytes that it and those before it pass to those after it."""
    place = {node: at for at, node in enumerate(order)}
    ends: dict[Any, int] = {}
    for node in graph.compute_nodes:
        for ref in tensor_inputs(node):
            if ref.node in place:
                ends[ref] = max(ends.get(ref, 0), place[node.id])
    found = [0.0] * len(order)
    for ref, end in ends.items():
        size = float(value_size(graph, ref))
        for at in range(place[ref.node], end):
            found[at] += size
    return found


# ── what is measured besides the nodes ───────────────────────────────────────────────────────────────────────────────
def _time_step(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the seconds of a forward and backward in this process; the model is left unchanged."""
    from gemini.ir.call_binding import ModelCall
    from gemini.snapshot.model_state import ModelSnapshot
    from gemini.snapshot.rng_snapshot import preserve_rng_state

    saved, call = ModelSnapshot(model, watch=True), ModelCall(args, kwargs)

    def step() -> None:
        inputs = call.arguments()
        _loss(model(*inputs[0], **inputs[1])).backward()
        model.zero_grad()

    try:
        with preserve_rng_state(), saved.watch_writes():
            return _least(step)
    finally:
        saved.restore()


def _loss(output: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_leaves

    found = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor) and one.requires_grad]
    return sum(one.float().mean() for one in found)


def _update_seconds(parameters: int) -> float:
    """Return the seconds in which plain gradient descent changes so many elements."""
    import torch

    values, gradients = torch.zeros(_UPDATED), torch.zeros(_UPDATED)
    return parameters / _UPDATED * _least(lambda: values.add_(gradients, alpha=-1e-9))


def _least(run: Callable[[], Any]) -> float:
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return min(taken)
