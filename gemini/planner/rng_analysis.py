"""Drawing: which random numbers each stage draws, found by running all stages on few samples, twice."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch

from gemini.batch_analysis.precompute import is_foreign, random_guards
from gemini.capture.batch_dim import BatchLayout
from gemini.capture.trace_state import USES_HOST_RNG
from gemini.ir.autograd_modes import RegionSwitch
from gemini.ir.call_binding import bind
from gemini.ir.graph import Graph
from gemini.ir.interpreter import Execution, GuardBroken, NodeFailed
from gemini.ir.node import Node
from gemini.pipe.piped_model import Piped
from gemini.pipe.rollback import Undo
from gemini.pipe.value_routes import Caller, returned
from gemini.planner.microbatch_sizes import part_of
from gemini.planner.step_plan import UnplannableError
from gemini.random_numbers.random_branches import Branches, Made, Unforeseeable
from gemini.random_numbers.random_ops import UnsliceableDraw
from gemini.random_numbers.rng_recorder import Draw, Pattern, Recorder, patterns

Recorded = list[list[Draw]]
Drawn = tuple[tuple[Pattern, ...], ...]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def record_draws(
    piped: Piped, args: tuple[Any, ...], kwargs: dict[str, Any], batch: BatchLayout
) -> tuple[Drawn, Branches | None]:
    """The draws of every stage, and branches on them; nothing of the model or the generator is left changed."""
    if not any(node.random for node in piped.graph.nodes) or batch.size < 2:
        return ((),) * len(piped.stages), None
    devices = {tensor.device.type for tensor in (*piped.model.parameters(), *piped.model.buffers())}
    if devices - {"cpu"}:  # kernels there draw in an order of their own, and give no part of it
        raise UnplannableError(
            f"it draws random numbers on {min(devices - {'cpu'})}, which cannot be drawn for the whole batch; "
            "rng='fast' would let every micro-batch draw its own"
        )
    if piped.graph.rolled:
        return _of_rolled(piped, (args, kwargs), batch), None
    more, fewer = (3, 2) if batch.size > 2 else (2, 1)
    calls = [part_of(args, kwargs, batch, 0, count) for count in (more, fewer)]
    try:
        if random_guards(piped.graph):
            return _by_node(piped, calls, (more, fewer))
        first, second = (_draws(piped, call) for call in calls)
        return tuple(tuple(patterns(one, more, other, fewer)) for one, other in zip(first, second, strict=True)), None
    except GuardBroken as error:
        raise UnplannableError(f"a branch depends on the number of samples: {error}") from error
    except UnsliceableDraw as error:
        raise UnplannableError(f"its random numbers cannot be drawn for the whole batch: {error}") from error
    except Unforeseeable as error:
        raise UnplannableError(str(error)) from error


def _of_rolled(piped: Piped, call: Arguments, batch: BatchLayout) -> Drawn:
    """Where stages run on so many samples only: the draws of their nodes beside those of the model on the batch."""
    samples = piped.graph.batch_size or 1
    if random_guards(piped.graph):
        raise UnplannableError("a branch depends on random numbers, in a model that loops over samples")
    try:
        few = draws_of_nodes(piped, part_of(*call, batch, 0, samples))
        every = iter(_draws_of_model(piped, call))
        many = {at: list(islice(every, len(found))) for at, found in sorted(few.items())}
        if next(every, None) is not None:
            raise UnsliceableDraw("there are more draws for more samples")
        made = {at: patterns(many[at], batch.size, found, samples) for at, found in few.items()}
    except UnsliceableDraw as error:
        raise UnplannableError(f"its random numbers cannot be drawn for the whole batch: {error}") from error
    return tuple(tuple(one for at in nodes for one in made.get(at, ())) for nodes in piped.partition.stages)


def _draws_of_model(piped: Piped, call: Arguments) -> list[Draw]:
    undo, recorder = Undo(piped._changeable, bind(piped.model, *call)), Recorder()
    try:
        with torch.random.fork_rng(), torch.no_grad(), recorder.recording():
            piped.model(*call[0], **call[1])
    finally:
        undo.undo()
    return recorder.draws


def _by_node(piped: Piped, calls: list[Arguments], sizes: tuple[int, int]) -> tuple[Drawn, Branches]:
    """The draws of every node: which way random numbers went in these runs does not matter."""
    first, second = (draws_of_nodes(piped, call) for call in calls)
    made = {
        at: [
            Made(pattern, one)
            for pattern, one in zip(patterns(found, sizes[0], second[at], sizes[1]), found, strict=True)
        ]
        for at, found in first.items()
    }
    stages = piped.partition.stages
    return tuple(tuple(one.pattern for at in nodes for one in made.get(at, ())) for nodes in stages), Branches(
        piped.graph, made
    )


def draws_of_nodes(piped: Piped, call: Arguments) -> dict[int, list[Draw]]:
    """The draws of every node that makes some, whichever way random numbers go; nothing is left changed."""
    graph, bound = piped.graph, bind(piped.model, *call)
    undo, execution, free = Undo(piped._changeable, bound), Execution(graph, piped.model, bound), random_guards(graph)
    found = {}
    try:
        with torch.random.fork_rng(), torch.no_grad(), RegionSwitch() as regions:
            for node in graph.nodes:
                execution.check([guard for guard in graph.guards_at().get(node.id, ()) if guard not in free])
                if not node.is_source and node.region is not None:
                    regions.to(node.region)
                recorder = Recorder()
                with recorder.recording() if node.random else nullcontext():
                    _step(execution, node)
                if node.random:
                    found[node.id] = recorder.draws
    finally:
        undo.undo()
    return found


def _step(execution: Execution, node: Node) -> None:
    try:
        execution.step(node)
    except NodeFailed as failed:
        if isinstance(failed.cause, UnsliceableDraw):  # the recorder's, not the node's
            raise failed.cause from failed
        raise UnplannableError(f"a part of the batch does not run alone: {failed}") from failed


def _draws(piped: Piped, call: Arguments) -> Recorded:
    bound = bind(piped.model, *call)
    undo = Undo(piped._changeable, bound)
    caller = Caller(piped.wiring, piped.model, bound)
    found = []
    try:
        with torch.random.fork_rng(), torch.no_grad():
            values = {port.name: caller.read_port(port) for port in piped.wiring.from_call}
            for interface, stage in zip(piped.interfaces, piped.stages, strict=True):
                recorder = Recorder()
                with recorder.recording():
                    made = stage(*[values[port.name] for port in interface.inputs])
                values.update(returned(interface, made))
                found.append(recorder.draws)
    finally:
        undo.undo()
    return found


def check_foreign(graph: Graph) -> None:
    """Refuse modules that draw from Python's or NumPy's generator in Python that is not followed.

    Such a call is not put off: others, of the program or of its models, draw from these generators in their turn.
    """
    found = [name for name, reason in graph.blocks.items() if reason.startswith(USES_HOST_RNG)]
    if found:
        raise UnplannableError(f"{found[0] or 'the model'} is not looked into, and {USES_HOST_RNG}")
    for node in graph.nodes:  # drawn ahead it would have no gradient, and layers that it calls would run twice
        if is_foreign(graph, node) and node.uses:
            raise UnplannableError(f"{node.name} computes with tensors of the model, and {USES_HOST_RNG}")
