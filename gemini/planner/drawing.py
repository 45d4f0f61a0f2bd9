"""Drawing: which random numbers each stage draws, found by running all stages on few samples, twice."""

from __future__ import annotations

from typing import Any

import torch

from gemini.capture.batches import BatchPlan
from gemini.capture.binding import bind
from gemini.capture.executor import GuardBroken
from gemini.pipe.piped import Piped
from gemini.pipe.undo import Undo
from gemini.pipe.wiring import Caller, returned
from gemini.planner.pieces import part_of
from gemini.planner.step_plan import UnplannableError
from gemini.randomness.fills import UnsliceableDraw
from gemini.randomness.recording import Draw, Pattern, Recorder, patterns

Recorded = list[list[Draw]]


def record_draws(
    piped: Piped, args: tuple[Any, ...], kwargs: dict[str, Any], batch: BatchPlan
) -> tuple[tuple[Pattern, ...], ...]:
    """The draws of every stage; nothing of the model or the generator is left changed."""
    if not any(node.random for node in piped.graph.nodes) or batch.size < 2:
        return ((),) * len(piped.stages)
    devices = {tensor.device.type for tensor in (*piped.model.parameters(), *piped.model.buffers())}
    if devices - {"cpu"} and any(node.random and node.checkpoint for node in piped.graph.nodes):
        # There backward, and what a checkpoint runs again in it, has threads of its own.
        raise UnplannableError("it draws random numbers inside a checkpoint, not on a CPU")
    more, fewer = (3, 2) if batch.size > 2 else (2, 1)
    try:
        first, second = (_draws(piped, part_of(args, kwargs, batch.dims, 0, count)) for count in (more, fewer))
        return tuple(tuple(patterns(one, more, other, fewer)) for one, other in zip(first, second, strict=True))
    except GuardBroken as error:
        raise UnplannableError(f"a branch depends on random numbers, or on few samples: {error}") from error
    except UnsliceableDraw as error:
        raise UnplannableError(f"its random numbers cannot be drawn for the whole batch: {error}") from error


def _draws(piped: Piped, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Recorded:
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
