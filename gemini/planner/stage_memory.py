"""Stage memory: the allocations and releases of each action of a stage for one micro-batch.

    F    values are freed after their last reader; tensors saved by autograd are retained
    B    frees saved tensors and allocates gradients, node by node in reverse; weight gradients come last
    I    the same; inputs of layers and gradients of their outputs are retained for W
    W    accumulates weight gradients, those of convolutions through a temporary

A recomputed stage retains nothing after F but its inputs; B and I begin with a second forward. A stage whose outputs go
into a loss is not recomputed: its backward follows at once.

Everything is derived from the nodes of the stage and the measurements of the profile. Values from other workers lie in
memory that is counted with the transfers (`worker_memory`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from gemini.ir.graph import Graph
from gemini.ir.node import Node, TensorMeta
from gemini.ir.pytree import Ref
from gemini.partition.assignment import Partition
from gemini.profiling.measured_device import MB
from gemini.profiling.node_costs import NodeCost
from gemini.profiling.node_tensors import MODEL_TENSORS, tensor_inputs, tensor_outputs, value_size
from gemini.profiling.profile_result import Profile

# On a CPU, measured with torch 2.13: MKL retains buffers for operands of products, oneDNN the code per layer and size:
# for the size of a micro-batch, and for that of the whole batch, which the first calls dispatch.
_PRODUCTS_MB = 5.5
_CONVOLUTION_MB = 2 * 0.4
LAYERS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding")
_FUNCTIONS = ("linear", "conv1d", "conv2d", "conv3d", "embedding")


Change = tuple[Hashable, float]  # a block and its MB; 0: it is freed


@dataclass(frozen=True)
class StageMemory:
    """The allocations of the actions of a stage for one micro-batch, in order."""

    forward: tuple[Change, ...]
    backward: tuple[Change, ...]
    input_gradient: tuple[Change, ...]
    weight_gradient: tuple[Change, ...]
    holds_inputs: bool  # weight gradients need values from other workers


class StageMemories:
    """The memory of stages of a graph, memoized; its profile is that of a batch of `micro_batches`."""

    def __init__(self, graph: Graph, profile: Profile, micro_batches: int, *, recompute: bool = False) -> None:
        self.graph, self.profile, self.micros, self.recompute = graph, profile, micro_batches, recompute
        self.cost_of = {cost.id: cost for cost in profile}
        self.results = set(graph.outputs())
        self.readers: dict[int, set[int]] = {}  # of each node
        for node in graph.compute_nodes:
            for ref in tensor_inputs(node):
                self.readers.setdefault(ref.node, set()).add(node.id)
        self._known: dict[tuple[tuple[int, ...], frozenset[int]], StageMemory] = {}

    @cached_property
    def size_ratio(self) -> float:
        """The ratio of the sizes in the profile to those in the graph."""
        measured = sum(cost.output_mb for cost in self.profile)
        captured = sum(value_size(self.graph, ref) for node in self.graph.compute_nodes for ref in tensor_outputs(node))
        return measured * MB / captured if captured else 1.0

    def size(self, ref: Ref) -> float:
        """Return the size of a value of one micro-batch (MB)."""
        return value_size(self.graph, ref) / MB * self.size_ratio / self.micros

    def requires_grad(self, ref: Ref) -> bool:
        """Return whether a value has a gradient."""
        source = self.graph.nodes[ref.node]
        meta = source.outputs.get((ref.source, ref.path))
        return source.kind not in MODEL_TENSORS and meta is not None and meta.requires_grad

    def libraries(self, nodes: Iterable[int]) -> float:
        """Return the memory that libraries retain for running some nodes on a CPU (MB)."""
        costs = [self.cost_of[node] for node in nodes]
        convolutions = {cost.node_class for cost in costs if _is_convolution(self.graph.nodes[cost.id])}
        metas = [meta for cost in costs for meta in self.graph.nodes[cost.id].outputs.values()]
        on_cpu = all(meta.device == "cpu" for meta in metas)
        return _PRODUCTS_MB + _CONVOLUTION_MB * len(convolutions) if costs and on_cpu else 0.0

    def of(self, partition: Partition, stage: int) -> StageMemory:
        """Return the memory of a stage."""
        key = partition.stages[stage], frozenset(self._local(partition, stage))
        if key not in self._known:
            self._known[key] = _StageWalk(self, *key).memory()
        return self._known[key]

    def _local(self, partition: Partition, stage: int) -> set[int]:
        """Return the values that earlier stages of the same worker have computed and do not retain."""
        found: set[int] = set()
        for other, nodes in enumerate(partition.stages):
            if other < stage and partition.workers[other] == partition.workers[stage]:
                costs = [self.cost_of[node] for node in nodes]
                found |= {value for cost in costs for value in cost.output_values}
                found -= {value for cost in costs for value in cost.saved_values}
        return found


class _StageWalk:
    """The nodes of a stage, forward and backward."""

    def __init__(self, stages: StageMemories, nodes: Sequence[int], local: frozenset[int]) -> None:
        self.all, self.graph, self.profile = stages, stages.graph, stages.profile
        self.costs = [stages.cost_of[node] for node in nodes]
        self.own = set(nodes)
        made = {value for cost in self.costs for value in cost.output_values if value not in cost.input_values}
        self.outside = {value for cost in self.costs for value in cost.input_values} - made - local

    def memory(self) -> StageMemory:
        layers = [cost for cost in self.costs if self.is_layer(cost)]
        inputs = {value for cost in layers for value in cost.saved_values}
        partly, later = self._backward(stores=True), self._weight_gradients(layers)
        ends: list[Change] = [(("gradient", ref), 0.0) for ref in self._inputs_with_gradient()]
        # Where other stages wait for gradients, B computes weight gradients after it has sent those.
        whole = [*partly, *later] if self._sends_gradients() else self._backward(stores=False)
        forward, first = [*self._forward()], list[Change]()
        if self.all.recompute and not [*self._loss_inputs()]:
            first = forward
            forward = [*forward, *((key, 0.0) for key in dict.fromkeys(key for key, _ in forward))]
        return StageMemory(
            tuple(forward), (*first, *whole, *ends), (*first, *partly, *ends), tuple(later), bool(inputs & self.outside)
        )

    def _block(self, value: int) -> list[Change]:
        """Return the allocation of a value, unless its memory is outside the stage."""
        return [] if value in self.outside else [(("value", value), self.profile.values_mb[value] / self.all.micros)]

    # ── kinds of nodes ─────────────────────────────────────────────────────────────────────────────────────────
    def is_layer(self, cost: NodeCost) -> bool:
        """Return whether the weight gradient of a node can be delayed."""
        node = self.graph.nodes[cost.id]
        if not cost.backward_ms or node.checkpoint or (node.region is not None and node.region.autocast):
            return False
        if node.kind == "module":
            return node.cls.rpartition(".")[2].rpartition(":")[2] in LAYERS and bool(cost.parameters)
        return node.kind == "op" and node.target.rpartition(".")[2] in _FUNCTIONS and bool(cost.parameters)

    def _own_gradient(self, cost: NodeCost) -> float:
        """Return the temporary memory of a weight gradient that is not accumulated in place (MB)."""
        node = self.graph.nodes[cost.id]
        return cost.parameter_mb if _is_convolution(node) else 0.0

    def _loss_inputs(self) -> Iterable[Ref]:
        """Yield the model outputs that go into a loss, which is modelled as a softmax."""
        for ref in self.all.results:
            if ref.node in self.own and has_loss(self.graph.meta(ref)):
                yield ref

    def _inputs_with_gradient(self) -> list[Ref]:
        """Return the values of other stages whose gradients this stage computes."""
        refs = {ref: None for cost in self.costs for ref in tensor_inputs(self.graph.nodes[cost.id])}
        return [ref for ref in refs if ref.node not in self.own and self.all.requires_grad(ref)]

    def _sends_gradients(self) -> bool:
        """Return whether other stages wait for gradients of this one."""
        return any(ref.node in self.all.cost_of for ref in self._inputs_with_gradient())

    # ── forward ────────────────────────────────────────────────────────────────────────────────────────────────
    def _forward(self) -> Iterator[Change]:
        last: dict[int, int] = {}  # the last node that needs a value, unless it is saved
        saved = {value for cost in self.costs if cost.backward_ms for value in cost.saved_values}
        for at, cost in enumerate(self.costs):
            last.update(dict.fromkeys((*cost.input_values, *cost.output_values), at))
        sent = [cost for cost in self.costs if self._is_sent(cost.id)]
        last.update({value: len(self.costs) for cost in sent for value in cost.output_values})
        for at, cost in enumerate(self.costs):
            made = [change for value in cost.output_values for change in self._block(value)]
            own = cost.saved_own_mb / self.all.micros
            new = [self.profile.values_mb[value] for value in cost.output_values if value not in cost.input_values]
            yield "temporary", (cost.forward_peak_mb - sum(new)) / self.all.micros - own
            yield from made
            yield ("own", cost.id), own
            yield "temporary", 0.0
            if not cost.backward_ms:
                yield ("own", cost.id), 0.0
            gone = {value for value in (*cost.input_values, *cost.output_values) if last[value] == at} - saved
            yield from ((("value", value), 0.0) for value in gone)
        yield from ((("loss", ref), self.all.size(ref)) for ref in self._loss_inputs())
        gone = {value for cost in sent for value in cost.output_values} - saved
        yield from ((("value", value), 0.0) for value in gone)

    def _is_sent(self, node: int) -> bool:
        """Return whether other stages or the caller read the output of a node."""
        return bool(self.all.readers.get(node, set()) - self.own) or any(ref.node == node for ref in self.all.results)

    # ── backward ───────────────────────────────────────────────────────────────────────────────────────────────
    def _backward(self, *, stores: bool) -> list[Change]:
        """Return the allocations of the backward; with `stores`, operands of delayed weight gradients are retained."""
        found: list[Change] = []
        pending: dict[Ref, float] = {}  # gradients
        for ref in self._loss_inputs():
            pending[ref] = self.all.size(ref)
            found += [(("scores", ref), pending[ref]), (("gradient", ref), pending[ref])]
            found += [(("scores", ref), 0.0), (("loss", ref), 0.0)]
        first: dict[int, int] = {}  # the node whose backward is the last to need a value
        for at, cost in reversed(list(enumerate(self.costs))):
            first.update(dict.fromkeys(cost.saved_values if cost.backward_ms else (), at))
        stored: set[int] = set()
        for at, cost in reversed(list(enumerate(self.costs))):
            if not cost.backward_ms:
                continue
            node, is_delayed = self.graph.nodes[cost.id], stores and self.is_layer(cost)
            stored |= set(cost.saved_values) if is_delayed else set()
            outputs = [ref for ref in tensor_outputs(node) if ref in pending]
            found += self._propagate_gradients(node, outputs, pending, self._fresh(cost, stores=stores), is_delayed)
            found.append((("own", cost.id), 0.0))
            found += [(("value", v), 0.0) for v in cost.saved_values if first[v] == at and v not in stored]
        return found

    def _propagate_gradients(
        self, node: Node, outputs: list[Ref], pending: dict[Ref, float], fresh: float, is_delayed: bool
    ) -> list[Change]:
        """Return the allocations of input gradients: new memory, or views of the output gradients."""
        inputs = [ref for ref in tensor_inputs(node) if self.all.requires_grad(ref)]
        total = sum(map(self.all.size, inputs))
        freed_mb = 0.0 if is_delayed else sum(pending[ref] for ref in outputs)
        is_view = fresh < total * 0.99
        share = min(1.0, (fresh + freed_mb if is_view else fresh) / total) if total else 0.0
        new = [(ref, self.all.size(ref) * share) for ref in inputs if ref not in pending]
        for ref in outputs:
            del pending[ref]
        pending.update(new)
        freed: list[Change] = [] if is_delayed else [(("gradient", ref), 0.0) for ref in outputs]
        allocated: list[Change] = [(("gradient", ref), mb) for ref, mb in new]
        temporary: list[Change] = [
            ("temporary", 0.0 if is_view else fresh - sum(mb for _, mb in new)),
            ("temporary", 0.0),
        ]
        return [*freed, *allocated, *temporary] if is_view else [*allocated, *temporary, *freed]

    def _weight_gradients(self, layers: Sequence[NodeCost]) -> list[Change]:
        """Return the allocations of delayed weight gradients, in the order of the backward."""
        found: list[Change] = []
        users = Counter(value for cost in layers for value in cost.saved_values)
        for cost in reversed(layers):
            found += [("temporary", self._own_gradient(cost)), ("temporary", 0.0)]
            found += [(("gradient", ref), 0.0) for ref in tensor_outputs(self.graph.nodes[cost.id])]
            users.subtract(cost.saved_values)
            found += [(("value", value), 0.0) for value in cost.saved_values if not users[value]]
        return found

    def _fresh(self, cost: NodeCost, *, stores: bool) -> float:
        """Return the allocation of the backward of a node: its measured peak without the memory in use when it began.

        Weight gradients that are delayed or accumulated in place take no memory.
        """
        node = self.graph.nodes[cost.id]
        if self.is_layer(cost):
            inputs = sum(self.all.size(ref) for ref in tensor_inputs(node) if self.all.requires_grad(ref))
            return inputs if stores else inputs + self._own_gradient(cost)
        made = set(cost.output_values) - set(cost.input_values)
        outputs = sum(self.profile.values_mb[value] for value in made) + cost.saved_own_mb
        gradients = sum(self.all.size(ref) for ref in tensor_outputs(node) if self.all.requires_grad(ref))
        return max(0.0, (cost.backward_peak_mb - outputs) / self.all.micros - gradients)


def _is_convolution(node: Node) -> bool:
    return "conv" in (node.cls if node.kind == "module" else node.target).lower()


def has_loss(meta: TensorMeta) -> bool:
    """Return whether an output is expected to go into a loss."""
    return meta.requires_grad and len(meta.shape) > 1 and getattr(torch, meta.dtype).is_floating_point
