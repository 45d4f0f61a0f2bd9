"""Keeping: buffers that the stages of a plan write, and who may.

Every micro-batch finds such a buffer as it was before the step, and leaves in it what the whole batch would have left.
Meanwhile nobody else may look: the stage that writes it must be the only one that has it, in one worker.
"""

from __future__ import annotations

from collections.abc import Iterator

from gemini.batch_analysis.batch_kinds import Opaque, Partial, Replicate, Shard, WeightedPartial
from gemini.batch_analysis.graph_analysis import GraphKinds
from gemini.batch_analysis.side_effects import written_buffers
from gemini.capture.attribute_writes import returned_writes
from gemini.ir.graph import Graph
from gemini.ir.pytree import Number, Ref, leaves
from gemini.ir.symint import Expr
from gemini.planner.step_plan import StepPlan, UnplannableError
from gemini.schedule.block import FORWARD

Once = tuple[tuple[int, ...], ...]


def find_written_buffers(plan: StepPlan) -> Once:
    """For every stage, the buffers that it writes once a step, by place among its own; () where none does.

    Running averages of micro-batches are not among them: they are written by every micro-batch, in order.
    """
    names = written_buffers(plan.graph)
    if not names:
        return ()
    averages = {name for name in names if name.rpartition(".")[0] in plan.forms.own_statistics}
    _check_order(plan, averages)
    buffers = dict(plan.graph.bound_model().named_buffers(remove_duplicate=False))
    written = {id(buffers[name]): name for name in names}
    stages = plan.build().stages
    once = {identity for identity, name in written.items() if name not in averages}
    found = tuple(tuple(at for at, one in enumerate(stage.buffers()) if id(one) in once) for stage in stages)
    for identity, name in written.items():
        holders = [at for at, stage in enumerate(stages) if any(id(one) == identity for one in stage.buffers())]
        if len(holders) > 1:
            raise UnplannableError(f"stages {holders} both use the buffer {name}, which is written")
    if len({block.stage for block in plan.schedule}) > len(stages):
        raise UnplannableError(f"it writes the buffer {min(names)}, and {plan.name} has a stage in two places")
    return found if any(found) else ()


def check_attribute_writes(graph: Graph, forms: GraphKinds, unsplit: str) -> None:
    """Attributes that calls leave must be had from the run that leaves them, and from nothing else."""
    left = returned_writes(graph)
    names = {str(one) for one in left}
    for node in graph.nodes:
        if node.kind == "attribute" and node.target.partition("[")[0] in names:
            raise UnplannableError(f"it reads {node.target}, in which an earlier call has kept something")
    if left and forms.own_statistics:
        raise UnplannableError(f"statistics of micro-batches, and {left[0]}, in which a call keeps something")
    values = zip(left, graph.result.items[1].items, strict=True) if left else ()  # type: ignore[union-attr]
    for one, form in values:
        if any(
            read.op in ("item", "call")
            for leaf in leaves(form)
            if isinstance(leaf, Number)
            for read in _tensor_reads(leaf)
        ):
            raise UnplannableError(f"{one} keeps a number that is read from contents")
        for ref in leaves(form) if not unsplit else ():
            kind = forms.kind(ref) if isinstance(ref, Ref) else Replicate()
            if not isinstance(kind, (Shard, Replicate, Partial, WeightedPartial)):
                why = f": {kind.reason}" if isinstance(kind, Opaque) else ""
                raise UnplannableError(f"{one} keeps something of the batch in an attribute{why}")


def _tensor_reads(number: Number) -> Iterator[Expr]:
    from gemini.ir.def_use import tensor_reads

    return tensor_reads(number.expr)


def check_outputs_joinable(forms: GraphKinds) -> None:
    """Where micro-batches have statistics of their own, the outputs of the model itself must be had from theirs."""
    if not forms.own_statistics:
        return
    kinds = [forms.kind(ref) for ref in forms.graph.outputs()]
    opaque = next((kind.reason for kind in kinds if isinstance(kind, Opaque)), "")
    if opaque or forms.interpreter.shares:
        raise UnplannableError(f"statistics of micro-batches, and an output that is not had from them: {opaque}")


def _check_order(plan: StepPlan, averages: set[str]) -> None:
    """Every stage must have the micro-batches in order, where it averages over them."""
    if not averages:
        return
    if any(node.checkpoint for node in plan.graph.nodes):
        raise UnplannableError("statistics of micro-batches and checkpoints do not go together")
    for device in range(plan.schedule.ndevs):
        seen: dict[int | None, int] = {}
        for block in plan.schedule.device_blocks(device):
            if block.btype == FORWARD:
                if block.mid < seen.get(block.stage, -1):
                    raise UnplannableError(
                        f"{plan.name} does not run micro-batches in order, as running averages need it"
                    )
                seen[block.stage] = block.mid
