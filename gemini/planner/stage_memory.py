"""The memory of a stage while it runs one micro-batch: what each of its actions takes, and what it leaves behind.

    F    values die with their last reader; what autograd saves is kept
    B    goes back through the nodes: saved tensors go, gradients come; weight gradients are left for the end
    I    the same; what the weight gradients need, inputs of layers and gradients of their outputs, is left for W
    W    adds up weight gradients, of convolutions from memory of their own

A stage that is recomputed keeps nothing after F but what it was given; B and I begin with its forward once more. One
that makes outputs which a loss follows is not recomputed: its backward comes next.

All of it is counted by going through the nodes of the stage with what the profile has measured of each. What arrives
from other workers lies in memory that is counted with the transfers (`worker_memory`).
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

# On a CPU, measured with torch 2.13: MKL keeps buffers for the operands of products, oneDNN the code of every layer and
# size: that of a micro-batch, and that of the whole batch, by which the first calls are dispatched.
_PRODUCTS_MB = 5.5
_CONVOLUTION_MB = 2 * 0.4
LAYERS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding")
_FUNCTIONS = ("linear", "conv1d", "conv2d", "conv3d", "embedding")


Change = tuple[Hashable, float]  # a block and its MB; 0: it goes


@dataclass(frozen=True)
class StageMemory:
    """What the actions of a stage take and give back for one micro-batch, in order."""

    forward: tuple[Change, ...]
    backward: tuple[Change, ...]
    input_gradient: tuple[Change, ...]
    weight_gradient: tuple[Change, ...]
    holds_inputs: bool  # whether weight gradients need what other workers have sent


class StageMemories:
    """Stages of a graph whose profile is of so many micro-batches; what was found for one is kept."""

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
    def pieces(self) -> float:
        """How many times the graph's sizes those of the profile are."""
        measured = sum(cost.output_mb for cost in self.profile)
        captured = sum(value_size(self.graph, ref) for node in self.graph.compute_nodes for ref in tensor_outputs(node))
        return measured * MB / captured if captured else 1.0

    def size(self, ref: Ref) -> float:
        """A value of one micro-batch."""
        return value_size(self.graph, ref) / MB * self.pieces / self.micros

    def requires_grad(self, ref: Ref) -> bool:
        """Whether a value has a gradient."""
        source = self.graph.nodes[ref.node]
        meta = source.outputs.get((ref.source, ref.path))
        return source.kind not in MODEL_TENSORS and meta is not None and meta.requires_grad

    def libraries(self, nodes: Iterable[int]) -> float:
        """What libraries keep for themselves that run some nodes on a CPU."""
        costs = [self.cost_of[node] for node in nodes]
        convolutions = {cost.node_class for cost in costs if _is_convolution(self.graph.nodes[cost.id])}
        metas = [meta for cost in costs for meta in self.graph.nodes[cost.id].outputs.values()]
        on_cpu = all(meta.device == "cpu" for meta in metas)
        return _PRODUCTS_MB + _CONVOLUTION_MB * len(convolutions) if costs and on_cpu else 0.0

    def of(self, partition: Partition, stage: int) -> StageMemory:
        """A stage."""
        key = partition.stages[stage], frozenset(self._local(partition, stage))
        if key not in self._known:
            self._known[key] = _Walk(self, *key).memory()
        return self._known[key]

    def _local(self, partition: Partition, stage: int) -> set[int]:
        """Values that earlier stages in the same worker have made and do not keep themselves."""
        found: set[int] = set()
        for other, nodes in enumerate(partition.stages):
            if other < stage and partition.workers[other] == partition.workers[stage]:
                costs = [self.cost_of[node] for node in nodes]
                found |= {value for cost in costs for value in cost.output_values}
                found -= {value for cost in costs for value in cost.saved_values}
        return found


class _Walk:
    """The nodes of a stage, forward and back."""

    def __init__(self, stages: StageMemories, nodes: Sequence[int], local: frozenset[int]) -> None:
        self.all, self.graph, self.profile = stages, stages.graph, stages.profile
        self.costs = [stages.cost_of[node] for node in nodes]
        self.own = set(nodes)
        made = {value for cost in self.costs for value in cost.output_values if value not in cost.input_values}
        self.outside = {value for cost in self.costs for value in cost.input_values} - made - local

    def memory(self) -> StageMemory:
        layers = [cost for cost in self.costs if self.is_layer(cost)]
        inputs = {value for cost in layers for value in cost.saved_values}
        partly, later = self._backward(stores=True), self._weights(layers)
        ends: list[Change] = [(("gradient", ref), 0.0) for ref in self._given()]
        # Where others wait for gradients, a whole backward computes those of weights when it has sent them.
        whole = [*partly, *later] if self._returns() else self._backward(stores=False)
        forward, first = [*self._forward()], list[Change]()
        if self.all.recompute and not [*self._scored()]:
            first = forward
            forward = [*forward, *((key, 0.0) for key in dict.fromkeys(key for key, _ in forward))]
        return StageMemory(
            tuple(forward), (*first, *whole, *ends), (*first, *partly, *ends), tuple(later), bool(inputs & self.outside)
        )

    def _block(self, value: int) -> list[Change]:
        """A value of the graph, unless it lies elsewhere."""
        return [] if value in self.outside else [(("value", value), self.profile.values_mb[value] / self.all.micros)]

    # ── what kind of node ──────────────────────────────────────────────────────────────────────────────────────
    def is_layer(self, cost: NodeCost) -> bool:
        """Whether its weight gradient may be computed later."""
        node = self.graph.nodes[cost.id]
        if not cost.backward_ms or node.checkpoint or (node.region is not None and node.region.autocast):
            return False
        if node.kind == "module":
            return node.cls.rpartition(".")[2].rpartition(":")[2] in LAYERS and bool(cost.parameters)
        return node.kind == "op" and node.target.rpartition(".")[2] in _FUNCTIONS and bool(cost.parameters)

    def _own_gradient(self, cost: NodeCost) -> float:
        """Memory for the gradient of a weight, where it is not added in place."""
        node = self.graph.nodes[cost.id]
        return cost.parameter_mb if _is_convolution(node) else 0.0

    def _scored(self) -> Iterable[Ref]:
        """Outputs of the model that a loss follows: a softmax stands for it."""
        for ref in self.all.results:
            if ref.node in self.own and has_loss(self.graph.meta(ref)):
                yield ref

    def _given(self) -> list[Ref]:
        """What others have made and get gradients of."""
        refs = {ref: None for cost in self.costs for ref in tensor_inputs(self.graph.nodes[cost.id])}
        return [ref for ref in refs if ref.node not in self.own and self.all.requires_grad(ref)]

    def _returns(self) -> bool:
        """Whether other stages wait for gradients of what they have given."""
        return any(ref.node in self.all.cost_of for ref in self._given())

    # ── forward ────────────────────────────────────────────────────────────────────────────────────────────────
    def _forward(self) -> Iterator[Change]:
        last: dict[int, int] = {}  # the node after which nobody needs a value, unless it is saved
        saved = {value for cost in self.costs if cost.backward_ms for value in cost.saved_values}
        for at, cost in enumerate(self.costs):
            last.update(dict.fromkeys((*cost.input_values, *cost.output_values), at))
        given_on = [cost for cost in self.costs if self._is_given_on(cost.id)]
        last.update({value: len(self.costs) for cost in given_on for value in cost.output_values})
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
        yield from ((("loss", ref), self.all.size(ref)) for ref in self._scored())
        gone = {value for cost in given_on for value in cost.output_values} - saved
        yield from ((("value", value), 0.0) for value in gone)

    def _is_given_on(self, node: int) -> bool:
        """Whether others than this stage read what a node has made."""
        return bool(self.all.readers.get(node, set()) - self.own) or any(ref.node == node for ref in self.all.results)

    # ── backward ───────────────────────────────────────────────────────────────────────────────────────────────
    def _backward(self, *, stores: bool) -> list[Change]:
        """With `stores`, what weight gradients need stays for later."""
        found: list[Change] = []
        pending: dict[Ref, float] = {}  # gradients
        for ref in self._scored():
            pending[ref] = self.all.size(ref)
            found += [(("scores", ref), pending[ref]), (("gradient", ref), pending[ref])]
            found += [(("scores", ref), 0.0), (("loss", ref), 0.0)]
        first: dict[int, int] = {}  # the node after whose backward nobody needs a value
        for at, cost in reversed(list(enumerate(self.costs))):
            first.update(dict.fromkeys(cost.saved_values if cost.backward_ms else (), at))
        stored: set[int] = set()
        for at, cost in reversed(list(enumerate(self.costs))):
            if not cost.backward_ms:
                continue
            node, is_left = self.graph.nodes[cost.id], stores and self.is_layer(cost)
            stored |= set(cost.saved_values) if is_left else set()
            given = [ref for ref in tensor_outputs(node) if ref in pending]
            found += self._given_back(node, given, pending, self._fresh(cost, stores=stores), is_left)
            found.append((("own", cost.id), 0.0))
            found += [(("value", v), 0.0) for v in cost.saved_values if first[v] == at and v not in stored]
        return found

    def _given_back(
        self, node: Node, given: list[Ref], pending: dict[Ref, float], fresh: float, is_left: bool
    ) -> list[Change]:
        """Gradients of inputs: memory of their own, or that of the gradients of outputs, which they may look at."""
        inputs = [ref for ref in tensor_inputs(node) if self.all.requires_grad(ref)]
        total = sum(map(self.all.size, inputs))
        outputs = 0.0 if is_left else sum(pending[ref] for ref in given)
        looks = fresh < total * 0.99
        share = min(1.0, (fresh + outputs if looks else fresh) / total) if total else 0.0
        new = [(ref, self.all.size(ref) * share) for ref in inputs if ref not in pending]
        for ref in given:
            del pending[ref]
        pending.update(new)
        go: list[Change] = [] if is_left else [(("gradient", ref), 0.0) for ref in given]
        come: list[Change] = [(("gradient", ref), mb) for ref, mb in new]
        spare: list[Change] = [("temporary", 0.0 if looks else fresh - sum(mb for _, mb in new)), ("temporary", 0.0)]
        return [*go, *come, *spare] if looks else [*come, *spare, *go]

    def _weights(self, layers: Sequence[NodeCost]) -> list[Change]:
        """Weight gradients, in the order in which they were left."""
        found: list[Change] = []
        users = Counter(value for cost in layers for value in cost.saved_values)
        for cost in reversed(layers):
            found += [("temporary", self._own_gradient(cost)), ("temporary", 0.0)]
            found += [(("gradient", ref), 0.0) for ref in tensor_outputs(self.graph.nodes[cost.id])]
            users.subtract(cost.saved_values)
            found += [(("value", value), 0.0) for value in cost.saved_values if not users[value]]
        return found

    def _fresh(self, cost: NodeCost, *, stores: bool) -> float:
        """What the backward of a node takes by itself: its measured peak without what was there when it began.

        Nor does it take memory for weight gradients that are computed later, or added in place.
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
    """Whether a loss is expected to follow an output."""
    return meta.requires_grad and len(meta.shape) > 1 and getattr(torch, meta.dtype).is_floating_point
