"""RNG analysis: the random numbers of each stage, found by running all stages on few samples, twice."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch

from gemini.batch_analysis.precompute import random_guards, uses_host_rng
from gemini.capture.batch_dim import BatchLayout
from gemini.capture.trace_state import USES_HOST_RNG
from gemini.ir.autograd_modes import RegionSwitch
from gemini.ir.call_binding import bind
from gemini.ir.graph import Graph
from gemini.ir.interpreter import Execution, GuardBroken, NodeFailed
from gemini.ir.node import Node
from gemini.pipe.piped_model import Piped
from gemini.pipe.rollback import Rollback
from gemini.pipe.value_routes import CallerSide, name_outputs
from gemini.planner.microbatch_split import find_part_like_batch, slice_call
from gemini.planner.step_plan import UnplannableError
from gemini.random_numbers.random_branches import NodeDraw, RandomBranches, UnpredictableBranch
from gemini.random_numbers.random_ops import UnsliceableRandomOp
from gemini.random_numbers.rng_recorder import RandomOp, RandomOpPattern, RandomOpRecorder, match_patterns

Recorded = list[list[RandomOp]]
StagePatterns = tuple[tuple[RandomOpPattern, ...], ...]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def record_stage_rng(
    piped: Piped, args: tuple[Any, ...], kwargs: dict[str, Any], batch: BatchLayout
) -> tuple[StagePatterns, RandomBranches | None]:
    """Return the random numbers of every stage, and branches on them; model and generators are left unchanged."""
    if not any(node.random for node in piped.graph.nodes) or batch.size < 2:
        return ((),) * len(piped.stages), None
    devices = {tensor.device.type for tensor in (*piped.model.parameters(), *piped.model.buffers())}
    if devices - {"cpu"}:  # kernels generate random numbers in their own order, which cannot be sliced
        raise UnplannableError(
            f"it uses random numbers on {min(devices - {'cpu'})}, which cannot be generated for the whole batch; "
            "rng='fast' generates them per micro-batch"
        )
    if piped.graph.rolled:
        return _record_sample_loop_rng(piped, (args, kwargs), batch), None
    more, fewer = (3, 2) if batch.size > 2 else (2, 1)
    call = args, kwargs
    calls = [
        find_part_like_batch(piped.graph, piped.model, call, batch, count) or slice_call(*call, batch, 0, count)
        for count in (more, fewer)
    ]
    try:
        if random_guards(piped.graph):
            return _record_with_branches(piped, calls, (more, fewer))
        first, second = (_record_stages(piped, call) for call in calls)
        return tuple(
            tuple(match_patterns(one, more, other, fewer)) for one, other in zip(first, second, strict=True)
        ), None
    except GuardBroken as error:
        raise UnplannableError(f"a branch depends on the number of samples: {error}") from error
    except UnsliceableRandomOp as error:
        raise UnplannableError(f"its random numbers cannot be generated for the whole batch: {error}") from error
    except UnpredictableBranch as error:
        raise UnplannableError(str(error)) from error


def _record_sample_loop_rng(piped: Piped, call: Arguments, batch: BatchLayout) -> StagePatterns:
    """Compare the random numbers of nodes on one micro-batch with those of the model on the batch.

    The stages of a sample loop run for one number of samples only.
    """
    samples = piped.graph.batch_size or 1
    if random_guards(piped.graph):
        raise UnplannableError("a branch depends on random numbers, in a model that loops over samples")
    try:
        few = record_node_rng(piped, slice_call(*call, batch, 0, samples))
        every = iter(_record_model_rng(piped, call))
        many = {at: list(islice(every, len(found))) for at, found in sorted(few.items())}
        if next(every, None) is not None:
            raise UnsliceableRandomOp("there are more random ops for more samples")
        made = {at: match_patterns(many[at], batch.size, found, samples) for at, found in few.items()}
    except UnsliceableRandomOp as error:
        raise UnplannableError(f"its random numbers cannot be generated for the whole batch: {error}") from error
    return tuple(tuple(one for at in nodes for one in made.get(at, ())) for nodes in piped.partition.stages)


def _record_model_rng(piped: Piped, call: Arguments) -> list[RandomOp]:
    rollback, recorder = Rollback(piped.mutable_state, bind(piped.model, *call)), RandomOpRecorder()
    try:
        with torch.random.fork_rng(), torch.no_grad(), recorder.recording():
            piped.model(*call[0], **call[1])
    finally:
        rollback.undo()
    return recorder.ops


def _record_with_branches(
    piped: Piped, calls: list[Arguments], sizes: tuple[int, int]
) -> tuple[StagePatterns, RandomBranches]:
    """Return the random numbers per node: the branches taken in these runs do not matter."""
    first, second = (record_node_rng(piped, call) for call in calls)
    made = {
        at: [
            NodeDraw(pattern, one)
            for pattern, one in zip(match_patterns(found, sizes[0], second[at], sizes[1]), found, strict=True)
        ]
        for at, found in first.items()
    }
    stages = piped.partition.stages
    return tuple(tuple(one.pattern for at in nodes for one in made.get(at, ())) for nodes in stages), RandomBranches(
        piped.graph, made
    )


def record_node_rng(piped: Piped, call: Arguments) -> dict[int, list[RandomOp]]:
    """Return the random ops of every random node, for any outcome of branches; all state is restored."""
    graph, bound = piped.graph, bind(piped.model, *call)
    rollback, execution = Rollback(piped.mutable_state, bound), Execution(graph, piped.model, bound)
    free = random_guards(graph)
    found = {}
    try:
        with torch.random.fork_rng(), torch.no_grad(), RegionSwitch() as regions:
            for node in graph.nodes:
                execution.check([guard for guard in graph.guards_at().get(node.id, ()) if guard not in free])
                if not node.is_source and node.region is not None:
                    regions.to(node.region)
                recorder = RandomOpRecorder()
                with recorder.recording() if node.random else nullcontext():
                    _run_node(execution, node)
                if node.random:
                    found[node.id] = recorder.ops
    finally:
        rollback.undo()
    return found


def _run_node(execution: Execution, node: Node) -> None:
    try:
        execution.step(node)
    except NodeFailed as failed:
        if isinstance(failed.cause, UnsliceableRandomOp):  # raised by the recorder
            raise failed.cause from failed
        raise UnplannableError(f"a part of the batch does not run alone: {failed}") from failed


def _record_stages(piped: Piped, call: Arguments) -> Recorded:
    bound = bind(piped.model, *call)
    rollback = Rollback(piped.mutable_state, bound)
    caller = CallerSide(piped.routes, piped.model, bound)
    found = []
    try:
        with torch.random.fork_rng(), torch.no_grad():
            values = {port.name: caller.read_port(port) for port in piped.routes.from_call}
            for interface, stage in zip(piped.interfaces, piped.stages, strict=True):
                recorder = RandomOpRecorder()
                with recorder.recording():
                    made = stage(*[values[port.name] for port in interface.inputs])
                values.update(name_outputs(interface, made))
                found.append(recorder.ops)
    finally:
        rollback.undo()
    return found


def check_host_rng(graph: Graph) -> None:
    """Refuse modules that use the generator of Python or NumPy in Python that is not traced.

    Such a call cannot be deferred: other code of the script uses these generators in between.
    """
    found = [name for name, reason in graph.blocks.items() if reason.startswith(USES_HOST_RNG)]
    if found:
        raise UnplannableError(f"{found[0] or 'the model'} is not traced, and {USES_HOST_RNG}")
    for node in graph.nodes:  # precomputed, it would have no gradient, and layers that it calls would run twice
        if uses_host_rng(graph, node) and node.uses:
            raise UnplannableError(f"{node.name} computes with tensors of the model, and {USES_HOST_RNG}")
