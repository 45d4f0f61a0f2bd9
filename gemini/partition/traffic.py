"""Traffic: values and gradients transferred between the stages of a partition.

A value is sent once to every worker that reads it, to the first stage of that worker that reads it; its later stages
reuse it. Values read on their own worker are not sent. The depth of a stage in transfers counts the worker changes on
the longest path to it:

    stage     0 ──► 1 ──► 2 ──► 3
    worker    0     1     1     0          worker changes: 0 1 1 2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gemini.ir.graph import Graph
from gemini.ir.pytree import Ref
from gemini.partition.assignment import Partition
from gemini.profiling.measured_device import MB
from gemini.profiling.node_tensors import tensor_inputs, value_size
from gemini.schedule.link_costs import Links


@dataclass(frozen=True)
class StageTransfer:
    """All values one stage passes to another; no bytes where only the order matters or both share a worker."""

    source: int
    target: int
    values: int  # tensors read
    sent: int  # of these, sent to another worker by this transfer
    sent_back: int  # gradients of the sent values
    forward_mb: float
    backward_mb: float
    gradients: bool  # whether a gradient is returned
    crosses: bool  # to another worker

    @property
    def mb(self) -> float:
        """Values and gradients."""
        return self.forward_mb + self.backward_mb

    def transfer_ms(self, links: Links, source: int, target: int, nmicros: int) -> float:
        """Return the transfer time for `nmicros` micro-batches, one message per value."""
        if not self.crosses or links.free:
            return 0.0
        forward = links.cost(source, target, 0) * self.sent * nmicros + _bandwidth_ms(
            links, source, target, self.forward_mb
        )
        backward = links.cost(target, source, 0) * self.sent_back * nmicros
        return float(forward + backward + _bandwidth_ms(links, target, source, self.backward_mb))


def _bandwidth_ms(links: Links, source: int, target: int, mb: float) -> float:
    return float(links.cost(source, target, mb * MB) - links.cost(source, target, 0))


def find_transfers(graph: Graph, partition: Partition, backward_ms: Sequence[float]) -> tuple[StageTransfer, ...]:
    """Return the transfers between stages; stages with `backward_ms` of 0 compute no gradients."""
    read = _values_read(graph, partition)
    has_backward = _has_backward(graph, read, backward_ms)
    sent: set[tuple[Ref, int]] = set()
    transfers = []
    for (source, target), values in sorted(read.items()):
        crosses = partition.workers[source] != partition.workers[target]
        new = [ref for ref in values if crosses and (ref, partition.workers[target]) not in sent]
        sent.update((ref, partition.workers[target]) for ref in new)
        back = {ref for ref in values if has_backward[target] and _has_gradient(graph, ref)}
        transfers.append(
            StageTransfer(
                source,
                target,
                values=len(values),
                sent=len(new),
                sent_back=len(back.intersection(new)),
                forward_mb=sum(value_size(graph, ref) for ref in new) / MB,
                backward_mb=sum(value_size(graph, ref) for ref in new if ref in back) / MB,
                gradients=bool(back),
                crosses=crosses,
            )
        )
    return tuple(transfers)


def _values_read(graph: Graph, partition: Partition) -> dict[tuple[int, int], dict[Ref, None]]:
    """Return the tensors that each stage reads from each other stage, in order; none where it only runs after it.

    A stage that uses the random generator runs after the previous stage that does: it receives the generator state.
    """
    found: dict[tuple[int, int], dict[Ref, None]] = defaultdict(dict)
    stage_of, last_random = partition.stage_of, None
    for node in graph.compute_nodes:
        target = stage_of[node.id]
        if node.random:
            if last_random is not None and last_random < target:
                found[last_random, target].update({})
            last_random = target
        for source in node.dependencies:
            if source in stage_of and stage_of[source] != target:
                found[stage_of[source], target].update({})
        for ref in tensor_inputs(node):
            if ref.node in stage_of and stage_of[ref.node] != target:
                found[stage_of[ref.node], target][ref] = None
    return found


def _has_backward(
    graph: Graph, read: dict[tuple[int, int], dict[Ref, None]], backward_ms: Sequence[float]
) -> tuple[bool, ...]:
    """Return whether each stage has a backward: its own compute, or gradients to pass on."""
    has_backward = [ms > 0 for ms in backward_ms]
    for (source, target), values in sorted(read.items(), reverse=True):  # readers first
        has_backward[source] = has_backward[source] or (
            has_backward[target] and any(_has_gradient(graph, ref) for ref in values)
        )
    return tuple(has_backward)


def _has_gradient(graph: Graph, ref: Ref) -> bool:
    meta = graph.nodes[ref.node].outputs.get((ref.source, ref.path))
    return meta is not None and meta.requires_grad


def stages_with_backward(transfers: Sequence[StageTransfer], backward_ms: Sequence[float]) -> tuple[bool, ...]:
    """Return whether each stage has a backward."""
    receiving = {transfer.source for transfer in transfers if transfer.gradients}
    return tuple(ms > 0 or stage in receiving for stage, ms in enumerate(backward_ms))


def count_worker_changes(transfers: Sequence[StageTransfer], nstages: int) -> tuple[int, ...]:
    """Return, for every stage, the worker changes on the longest path to it."""
    changes = [0] * nstages
    for transfer in sorted(
        transfers, key=lambda transfer: transfer.target
    ):  # sources are final before their targets are visited
        changes[transfer.target] = max(changes[transfer.target], changes[transfer.source] + transfer.crosses)
    return tuple(changes)
