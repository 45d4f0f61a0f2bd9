"""Flows: what crosses from stage to stage, forward and back, once the stage of every node is known.

A value is sent once to every worker that needs it, to the first stage there that reads it; the other stages of that
worker have it then. What stays on its worker moves nothing. Hops count the changes of worker on the longest way:

    stage     0 ──► 1 ──► 2 ──► 3
    worker    0     1     1     0          hops to each stage: 0 1 1 2
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
class Flow:
    """All that one stage gives another; no bytes where only the order matters, or where both share a worker."""

    source: int
    target: int
    values: int  # tensors read
    sent: int  # of these, sent to another worker by this flow
    sent_back: int  # gradients of these
    forward_mb: float
    backward_mb: float
    gradients: bool  # whether a gradient comes back
    crosses: bool  # to another worker

    @property
    def mb(self) -> float:
        """Both directions."""
        return self.forward_mb + self.backward_mb

    def transfer_ms(self, links: Links, source: int, target: int, nmicros: int) -> float:
        """The time of moving it all, in `nmicros` micro-batches, each value on its own."""
        if not self.crosses or links.free:
            return 0.0
        there = links.cost(source, target, 0) * self.sent * nmicros + _moving(links, source, target, self.forward_mb)
        back = links.cost(target, source, 0) * self.sent_back * nmicros
        return float(there + back + _moving(links, target, source, self.backward_mb))


def _moving(links: Links, source: int, target: int, mb: float) -> float:
    return float(links.cost(source, target, mb * MB) - links.cost(source, target, 0))


def find_flows(graph: Graph, partition: Partition, backward_ms: Sequence[float]) -> tuple[Flow, ...]:
    """The flows between stages; `backward_ms` tells which stages compute gradients at all."""
    read = _values_read(graph, partition)
    learns = _learning(graph, read, backward_ms)
    sent: set[tuple[Ref, int]] = set()
    flows = []
    for (source, target), values in sorted(read.items()):
        crosses = partition.workers[source] != partition.workers[target]
        new = [ref for ref in values if crosses and (ref, partition.workers[target]) not in sent]
        sent.update((ref, partition.workers[target]) for ref in new)
        back = {ref for ref in values if learns[target] and _has_gradient(graph, ref)}
        flows.append(
            Flow(
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
    return tuple(flows)


def _values_read(graph: Graph, partition: Partition) -> dict[tuple[int, int], dict[Ref, None]]:
    """The tensors that each stage reads from each other one, in order; none where it only follows it.

    A stage that draws random numbers follows the one that drew before it: it is given the generator's state by that.
    """
    found: dict[tuple[int, int], dict[Ref, None]] = defaultdict(dict)
    stage_of, drew = partition.stage_of, None
    for node in graph.compute_nodes:
        target = stage_of[node.id]
        if node.random:
            if drew is not None and drew < target:
                found[drew, target].update({})
            drew = target
        for source in node.dependencies:
            if source in stage_of and stage_of[source] != target:
                found[stage_of[source], target].update({})
        for ref in tensor_inputs(node):
            if ref.node in stage_of and stage_of[ref.node] != target:
                found[stage_of[ref.node], target][ref] = None
    return found


def _learning(
    graph: Graph, read: dict[tuple[int, int], dict[Ref, None]], backward_ms: Sequence[float]
) -> tuple[bool, ...]:
    """Whether each stage has a backward: work of its own, or gradients to pass on."""
    learns = [ms > 0 for ms in backward_ms]
    for (source, target), values in sorted(read.items(), reverse=True):  # readers first
        learns[source] = learns[source] or (learns[target] and any(_has_gradient(graph, ref) for ref in values))
    return tuple(learns)


def _has_gradient(graph: Graph, ref: Ref) -> bool:
    meta = graph.nodes[ref.node].outputs.get((ref.source, ref.path))
    return meta is not None and meta.requires_grad


def learning_stages(flows: Sequence[Flow], backward_ms: Sequence[float]) -> tuple[bool, ...]:
    """Whether each stage has a backward."""
    giving = {flow.source for flow in flows if flow.gradients}
    return tuple(ms > 0 or stage in giving for stage, ms in enumerate(backward_ms))


def hops_to(flows: Sequence[Flow], nstages: int) -> tuple[int, ...]:
    """For every stage, the changes of worker on the longest way to it."""
    hops = [0] * nstages
    for flow in sorted(flows, key=lambda flow: flow.target):  # sources are final before their targets are asked
        hops[flow.target] = max(hops[flow.target], hops[flow.source] + flow.crosses)
    return tuple(hops)
