"""Buffer writes: which buffers the stages of a plan write, and the conditions for that.

Every micro-batch reads such a buffer with its value before the step and writes the value of the whole batch. So only
one stage, on one worker, may use it.
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

StageBuffers = tuple[tuple[int, ...], ...]


def find_written_buffers(plan: StepPlan) -> StageBuffers:
    """Return per stage the indices of the buffers that it writes once per step; () where no stage writes any.

    Running averages with statistics per micro-batch are excluded: every micro-batch writes them, in order.
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
            raise UnplannableError(f"stages {holders} both use the buffer {name}, which one of them writes")
    if len({block.stage for block in plan.schedule}) > len(stages):
        raise UnplannableError(f"it writes the buffer {min(names)}, and {plan.name} has a stage on two workers")
    return found if any(found) else ()


def check_attribute_writes(graph: Graph, forms: GraphKinds, single_reason: str) -> None:
    """Raise UnplannableError unless the attributes that a call writes can be computed from its micro-batches alone."""
    writes = returned_writes(graph)
    names = {str(one) for one in writes}
    for node in graph.nodes:
        if node.kind == "attribute" and node.target.partition("[")[0] in names:
            raise UnplannableError(f"it reads {node.target}, which an earlier call has written")
    if writes and forms.own_statistics:
        raise UnplannableError(f"statistics per micro-batch, and {writes[0]}, which a call writes")
    values = zip(writes, graph.result.items[1].items, strict=True) if writes else ()  # type: ignore[union-attr]
    for one, form in values:
        if any(
            read.op in ("item", "call")
            for leaf in leaves(form)
            if isinstance(leaf, Number)
            for read in _tensor_reads(leaf)
        ):
            raise UnplannableError(f"{one} stores a number that is read from a tensor")
        for ref in leaves(form) if not single_reason else ():
            kind = forms.kind(ref) if isinstance(ref, Ref) else Replicate()
            if not isinstance(kind, (Shard, Replicate, Partial, WeightedPartial)):
                why = f": {kind.reason}" if isinstance(kind, Opaque) else ""
                raise UnplannableError(f"{one} stores a value of the batch{why}")


def _tensor_reads(number: Number) -> Iterator[Expr]:
    from gemini.ir.def_use import tensor_reads

    return tensor_reads(number.expr)


def check_outputs_joinable(forms: GraphKinds) -> None:
    """With statistics per micro-batch, raise UnplannableError unless the outputs can be joined from micro-batches."""
    if not forms.own_statistics:
        return
    kinds = [forms.kind(ref) for ref in forms.graph.outputs()]
    opaque = next((kind.reason for kind in kinds if isinstance(kind, Opaque)), "")
    if opaque or forms.interpreter.shares:
        raise UnplannableError(f"statistics per micro-batch, and an output that cannot be joined from them: {opaque}")


def _check_order(plan: StepPlan, averages: set[str]) -> None:
    """Raise UnplannableError where a stage with running averages does not run the micro-batches in order."""
    if not averages:
        return
    if any(node.checkpoint or node.recomputed for node in plan.graph.nodes):
        raise UnplannableError("statistics per micro-batch and activation checkpoints cannot be combined")
    for device in range(plan.schedule.ndevs):
        seen: dict[int | None, int] = {}
        for block in plan.schedule.device_blocks(device):
            if block.btype == FORWARD:
                if block.mid < seen.get(block.stage, -1):
                    raise UnplannableError(
                        f"{plan.name} does not run micro-batches in order, as running averages require"
                    )
                seen[block.stage] = block.mid
