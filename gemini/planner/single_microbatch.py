"""Single micro-batch: the plan for a batch that cannot be split.

Batch normalization in training, a loss that compares samples, Python that counts samples: such models still run in
stages. The step is one request to the workers, the loss runs with the last stage, and a worker computes weight
gradients while another continues with backward.

    worker 0   F ───────────── I W
    worker 1       F L I W

No proof is needed: every stage processes all samples, and generates the same random numbers as the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.batch_analysis.precompute import random_guards
from gemini.batch_analysis.side_effects import find_obstacle
from gemini.capture.attribute_writes import ASSIGN
from gemini.capture.batch_dim import BatchLayout
from gemini.capture.options import CaptureOptions
from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.graph import Graph
from gemini.ir.interpreter import GuardBroken
from gemini.ir.pytree import Number, Ref, leaves
from gemini.pipe.rollback import Rollback
from gemini.pipe.value_routes import CallerSide, name_outputs
from gemini.planner.microbatch_capture import MicroBatch, capture_graph, check_batch_dims
from gemini.planner.rng_analysis import record_node_rng
from gemini.planner.step_plan import UnplannableError
from gemini.random_numbers.random_branches import NodeDraw, RandomBranches, UnpredictableBranch
from gemini.random_numbers.random_ops import UnsliceableRandomOp
from gemini.random_numbers.rng_recorder import RandomOpPattern, match_patterns
from gemini.snapshot.rng_snapshot import host_rng_fingerprint, torch_rng_fingerprint

if TYPE_CHECKING:
    from gemini.pipe.piped_model import Piped
    from gemini.planner.plan_request import PlanRequest

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_UNSLICED = RandomOpPattern("", (), (), None)  # random numbers of the whole batch at once


def capture_whole_batch(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: BatchLayout | None, request: PlanRequest
) -> tuple[MicroBatch, BatchLayout]:
    """Capture the whole batch, with its sample dimensions where they are known; raises UnplannableError."""
    from gemini.batch_analysis.graph_analysis import GraphKinds
    from gemini.batch_analysis.propagate import KindInterpreter

    options = CaptureOptions(batch, opens_leaves=request.divides)
    graph = capture_graph(model, args, kwargs, request, options)
    fault = find_obstacle(graph) or _find_side_effect(graph)
    if fault:
        raise UnplannableError(fault)
    if batch is not None:
        try:
            check_batch_dims(graph, (args, kwargs), batch)
        except UnplannableError:
            batch = None
    if batch is None or graph.batch_size is None or random_guards(graph):  # random numbers are recorded for this size
        batch = BatchLayout((None,) * len(ModelCall(args, kwargs).tensors), 1)
    return MicroBatch(graph, GraphKinds(graph, KindInterpreter()), (args, kwargs), [batch.size], 1.0), batch


def _find_side_effect(graph: Graph) -> str:
    """Return a side effect that would stay in a worker; '' if there is none.

    Branches on contents are no obstacle: stages evaluate them on all samples, as the model does.
    """
    model = graph.bound_model()
    for node in graph.nodes:
        if node.target == ASSIGN and any(isinstance(leaf, (Ref, Number)) for leaf in leaves(node.args)):
            return f"{node.name} stores a value of the batch in an attribute"
        for owner in node.changes if node.target != ASSIGN else ():
            if not type(model.get_submodule(owner)).__module__.startswith("torch.nn."):
                return f"{node.name} stores a value per run ({owner})"
    return ""


def find_whole_batch_branches(piped: Piped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RandomBranches | None:
    """Return the branches on random numbers; the plan is for those that the current generator state selects."""
    if not random_guards(piped.graph):
        return None
    try:
        found = record_node_rng(piped, (args, kwargs))
        made = {at: [*map(NodeDraw, match_patterns(one, 1, one, 1), one)] for at, one in found.items()}
        return RandomBranches(piped.graph, made)
    except (UnsliceableRandomOp, UnpredictableBranch, GuardBroken) as error:
        raise UnplannableError(f"a branch on random numbers cannot be predicted: {error}") from error


def record_whole_batch_rng(
    piped: Piped, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[RandomOpPattern, ...], ...]:
    """Return which stages generate random numbers, by running them; model and generators are left unchanged."""
    if not any(node.random for node in piped.graph.nodes):
        return ((),) * len(piped.stages)
    bound = bind(piped.model, args, kwargs)
    rollback = Rollback(piped.mutable_state, bound)
    caller = CallerSide(piped.routes, piped.model, bound)
    found: list[tuple[RandomOpPattern, ...]] = []
    try:
        with torch.random.fork_rng(), torch.no_grad():
            values = {port.name: caller.read_port(port) for port in piped.routes.from_call}
            for interface, stage in zip(piped.interfaces, piped.stages, strict=True):
                torch_before, host_before = torch_rng_fingerprint(), host_rng_fingerprint()
                try:
                    made = stage(*[values[port.name] for port in interface.inputs])
                except GuardBroken as broken:
                    raise UnplannableError(f"a branch is not reproducible: {broken}") from broken
                values.update(name_outputs(interface, made))
                if host_rng_fingerprint() != host_before:
                    raise UnplannableError("it uses the random numbers of Python or NumPy")
                found.append((_UNSLICED,) if torch_rng_fingerprint() != torch_before else ())
    finally:
        rollback.undo()
    return tuple(found)
