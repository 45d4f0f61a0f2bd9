"""Reference run: a tape on the values of one micro-batch, and a graph by micro-batches, in one process.

The reference for every executor of a splitting: nodes and ops are weighted, numbers of samples in the tape are those of
the micro-batch, operands are sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from gemini.batch_analysis.batch_kinds import Shard
from gemini.batch_analysis.loss_tape import Tape
from gemini.batch_analysis.microbatch_weights import weigh
from gemini.batch_analysis.precompute import random_guards
from gemini.batch_analysis.split_result import Splitting
from gemini.batch_analysis.tape_interpreter import OpRaised, run_ops
from gemini.ir.autograd_modes import RegionSwitch
from gemini.ir.graph import Graph
from gemini.ir.interpreter import Execution
from gemini.ir.pytree import Ref, expr_refs


def micro_batch_ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, length) of every micro-batch."""
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
    """Return all values of a tape, or those of the `needed` ops; with a splitting, for a micro-batch of `samples`.

    With `double` the results of ops that round are converted to float64 again, since not every op takes mixed types.
    """
    indices = range(len(tape.ops)) if needed is None else needed
    ops = ((at, tape.ops[at] if splitting is None else splitting.op(at, tape.ops[at], samples)) for at in indices)
    values: dict[int, Any] = {**dict(enumerate(outputs)), **operands}
    try:
        run_ops(ops, values, weights=weights or {}, convert=_to_double if double else None)
    except OpRaised as raised:
        raise raised.error from None
    return values


def _to_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def split_operands(tape: Tape, splitting: Splitting, start: int, length: int, total: int) -> dict[int, torch.Tensor]:
    """Return the operands for one micro-batch."""
    found = {}
    for number, tensor in tape.operands.items():
        kind = splitting.outputs[number]
        found[number] = kind.take(tensor, start, length, total) if isinstance(kind, Shard) else tensor
    return found


def run_graph(
    graph: Graph,
    bound: dict[str, Any],
    weights: Mapping[int, Any],
    drawn: Mapping[int, Any] | None = None,
    but: Collection[int] = (),
) -> dict[Ref, torch.Tensor]:
    """Return the outputs of a graph on a micro-batch; `drawn` are the results of random nodes.

    Branches on random numbers are not checked. Nodes in `but`, which no other needs, and branches on them are skipped.
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
