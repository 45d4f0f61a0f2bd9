"""Running: a tape on the values of one micro-batch, and a graph by micro-batches in one process.

The reference for whoever runs a splitting: flagged nodes and ops are weighed, numbers of samples in the tape are those
of the micro-batch, operands are taken apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from gemini.batch_analysis.batch_kinds import Sample
from gemini.batch_analysis.loss_tape import Tape
from gemini.batch_analysis.microbatch_weights import weigh
from gemini.batch_analysis.split_result import Splitting
from gemini.ir.autograd_modes import Region, RegionSwitch
from gemini.ir.encode import decode, tensors
from gemini.ir.graph import Graph
from gemini.ir.interpreter import Execution
from gemini.ir.pytree import Ref, expr_refs
from gemini.random_numbers.random_branches import random_guards


def pieces(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(start, length) of every micro-batch."""
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return list(zip(starts, sizes, strict=True))


def run_tape(  # noqa: PLR0917
    tape: Tape,
    outputs: Sequence[torch.Tensor],
    operands: Mapping[int, torch.Tensor],
    splitting: Splitting | None = None,
    samples: int = 0,
    weights: Mapping[int, Any] | None = None,
    needed: Sequence[int] | None = None,
    *,
    double: bool = False,
) -> dict[int, torch.Tensor]:
    """All values of a tape, or those that some ops make; with a splitting, of a micro-batch of so many samples.

    Given values are `double` where numbers are compared. What an op rounds goes on in float64 then: the others are, and
    not every op takes both.
    """
    values: dict[int, Any] = {**dict(enumerate(outputs)), **operands}
    for at in range(len(tape.ops)) if needed is None else needed:
        op = tape.ops[at]
        made = op if splitting is None else splitting.op(at, op, samples)
        args, kwargs = decode(made.form, lambda ref: values[ref.node])
        with ExitStack() as stack:
            op.region.enter(stack, Region.current())
            result = op.function(*args, **kwargs)
            if weights and at in weights:
                result = weigh(result, weights[at])
        found = [tensor for _, tensor in tensors(result)] if result is not None else [values[op.writes]]  # type: ignore[index]
        if double and op.writes is None:
            found = [one.double() if one.is_floating_point() else one for one in found]
        values.update(zip(op.results, found, strict=True))
        if op.writes is not None and op.results:
            values[op.writes] = values[op.results[0]]
    return values


def split_operands(tape: Tape, splitting: Splitting, start: int, length: int, total: int) -> dict[int, torch.Tensor]:
    """The operands of a micro-batch."""
    found = {}
    for number, tensor in tape.operands.items():
        kind = splitting.outputs[number]
        found[number] = kind.take(tensor, start, length, total) if isinstance(kind, Sample) else tensor
    return found


def run_graph(
    graph: Graph,
    bound: dict[str, Any],
    weights: Mapping[int, Any],
    drawn: Mapping[int, Any] | None = None,
    but: Collection[int] = (),
) -> dict[Ref, torch.Tensor]:
    """The outputs of a graph on a micro-batch; `drawn` are the results of nodes that draw random numbers.

    Branches on random numbers are not looked at: the graph is run as it is, whatever was drawn. All is run `but` for
    some nodes, which no other needs, and branches on what they make.
    """
    execution = Execution(graph, graph.bound_model(), bound)
    free = random_guards(graph)
    with RegionSwitch() as regions:
        for node in graph.nodes:
            guards = [guard for guard in graph.guards_at().get(node.id, ()) if guard not in free]
            execution.check([g for g in guards if not any(ref.node in but for ref in expr_refs(g.expr))])
            if node.id in but:
                continue
            if not node.is_source and node.region is not None:
                regions.to(node.region)
            execution.step(node)
            if drawn is not None and node.id in drawn:
                execution.results[node.id] = drawn[node.id]
            if node.id in weights:
                execution.results[node.id] = weigh(execution.results[node.id], weights[node.id])
    return {ref: execution.read(ref) for ref in graph.outputs()}
