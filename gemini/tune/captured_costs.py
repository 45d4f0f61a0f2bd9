"""Captured costs: any model as a chain of layers, from its graph and its profile.

    transformer.embed │ transformer.layer.0 │ layer.1 │ … │ layer.23 │ norm, head
    └── embedding ────┘└──────────── layers ───────────────┘└── head ──┘

Layers are the modules of the largest numbered list of scopes; what runs before the first belongs to the embedding and
what runs after the last to the head. A model without such a list is a chain of its nodes. Times are those of the
profile, in proportion to the samples of a micro-batch, and a fixed part per node.

On shards of a tensor-parallel group, nodes with matrix operations take 1/T of their time; all others run whole.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gemini.cluster.device_class import DeviceClass
from gemini.tune.layer_cost import LayerCost, spread_layers
from gemini.tune.parallel_config import ParallelConfig

if TYPE_CHECKING:
    from gemini.profiling.node_costs import NodeCost
    from gemini.profiling.profile_result import Profile

_MEGA = 2.0**20
_WEIGHT_SHARE = 0.5  # of a backward, where it was not measured


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes of a graph, measured on the captured batch; seconds, bytes and elements."""

    name: str
    forward: float
    input_gradient: float
    weight_gradient: float
    sharded: float  # share of the time that tensor parallelism divides
    parameters: float
    saved: float
    boundary: float
    flops: float
    nodes: int

    @property
    def signature(self) -> tuple[float, ...]:
        """Equal for layers of equal cost, within 5 % of time."""
        return (round(self.parameters), round(self.saved), self.nodes, round(self.flops))


@dataclass(frozen=True)
class CapturedCosts:
    """The `CostModel` of a captured model; `samples` is the size of the captured batch."""

    name: str
    first: Segment
    chain: tuple[Segment, ...]
    last: Segment
    samples: int
    parameters: float
    scale: float = 1.0
    fixed: float = 0.0  # seconds per node and pass that do not shrink with the batch
    sequence: int = 1

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.chain)

    def model_flops(self, batch: float) -> float:
        """Operations of a step on a batch of that many samples."""
        return 3 * sum(part.flops for part in (self.first, *self.chain, self.last)) * batch / self.samples

    def faults(self, config: ParallelConfig) -> list[str]:
        """Return why this model cannot be split so."""
        found = []
        if config.context > 1:
            found.append(f"context {config.context} for a captured model, whose sequence is not known")
        if config.expert > 1:
            found.append(f"expert {config.expert} for a captured model, whose experts are not known")
        if config.recompute == "attention":
            found.append("recompute attention for a captured model, whose attention is not known")
        return found

    def layer_kinds(self, config: ParallelConfig, device: DeviceClass) -> tuple[tuple[LayerCost, int], ...]:
        """Return the layers, equal neighbours together, with the mean time of all equal ones."""
        del device  # times are those of the profile
        return _kinds(self, config.micro_batch, config.tensor, config.recompute)

    block_seconds = 0.0

    def layer_counts(self, config: ParallelConfig, device: DeviceClass) -> tuple[int, ...]:
        """Return an even number of layers per stage."""
        del device
        return spread_layers(self.layers, config.stages)

    def controller_seconds(self, config: ParallelConfig) -> float | None:
        """Return None: every device updates its own weights."""
        del config
        return None

    def embedding(self, config: ParallelConfig, device: DeviceClass) -> LayerCost:
        """Return what runs before the first layer."""
        del device
        return self.cost(self.first, config.micro_batch, config.tensor, "none")

    def head(self, config: ParallelConfig, device: DeviceClass) -> LayerCost:
        """Return what runs after the last layer."""
        del device
        return self.cost(self.last, config.micro_batch, config.tensor, "none")

    def cost(self, part: Segment, micro_batch: int, tensor: int, recompute: str) -> LayerCost:
        """Return the cost of a segment."""
        share = micro_batch / self.samples
        split = part.sharded / tensor + 1 - part.sharded
        fixed = part.nodes * self.fixed
        forward = (max(0.0, part.forward - fixed) * share * split + min(fixed, part.forward)) * self.scale
        late = (part.input_gradient + part.weight_gradient) * split * self.scale
        late = max(0.0, late - 2 * fixed) * share + min(2 * fixed, late)
        weight = part.weight_gradient / max(1e-12, part.input_gradient + part.weight_gradient)
        saved = part.saved * share * split
        whole = recompute == "full"
        kept = part.boundary * share if whole else saved * (0.5 if recompute == "selective" else 1.0)
        repeated = {"full": forward, "selective": 0.5 * forward}.get(recompute, 0.0)
        return LayerCost(
            forward=forward,
            input_gradient=late * (1 - weight),
            weight_gradient=late * weight,
            recompute=repeated,
            parameters=part.parameters / tensor,
            activations=min(kept, saved) if saved else kept,
            dropped=max(0.0, saved - kept),
            workspace=max(0.0, saved - kept),
            boundary=part.boundary * share,
            tensor_bytes=part.boundary * share,
            tensor_reduces=2 if tensor > 1 and part.sharded else 0,
            flops=part.flops * share * split,
            recomputed_flops=part.flops * share * split if whole else 0.0,
        )


@functools.lru_cache(maxsize=1024)
def _kinds(model: CapturedCosts, micro_batch: int, tensor: int, recompute: str) -> tuple[tuple[LayerCost, int], ...]:
    equal: dict[tuple[float, ...], list[Segment]] = {}
    for part in model.chain:
        equal.setdefault(part.signature, []).append(part)
    pooled = {key: _mean(parts) for key, parts in equal.items()}
    costs = {key: model.cost(part, micro_batch, tensor, recompute) for key, part in pooled.items()}
    kinds: list[tuple[LayerCost, int]] = []
    for part in model.chain:
        cost = costs[part.signature]
        if kinds and kinds[-1][0] is cost:
            kinds[-1] = (cost, kinds[-1][1] + 1)
        else:
            kinds.append((cost, 1))
    return tuple(kinds)


def _mean(parts: Sequence[Segment]) -> Segment:
    count = len(parts)
    names = ("forward", "input_gradient", "weight_gradient", "sharded", "boundary")
    return replace(parts[0], **{name: sum(getattr(part, name) for part in parts) / count for name in names})


# ── from a graph ─────────────────────────────────────────────────────────────────────────────────────────────────────
def captured_costs(
    graph: Any, profile: Profile, samples: int, *, fixed_us: float = 0.0, width: float = 1.0
) -> CapturedCosts:
    """Return the costs of a captured graph with its profile.

    `fixed_us` of a node's time do not shrink with the batch; activations take `width` of their captured bytes.
    """
    nodes = list(profile)
    keys = _layer_keys([node.name for node in nodes])
    indices = [index for index, key in enumerate(keys) if key is not None]
    if len({keys[index] for index in indices}) < 2:
        keys = [str(index) for index in range(len(nodes))]  # a chain of nodes
        indices = list(range(len(nodes)))
    begin, end = indices[0], indices[-1] + 1
    chain: list[list[NodeCost]] = []
    names: list[str] = []
    for index in range(begin, end):
        key = keys[index] or names[-1]
        if not names or (key != names[-1] and key not in names):
            chain.append([])
            names.append(key)
        chain[-1].append(nodes[index])
    owned: set[str] = set()
    size = max(1.0, _element_size(graph))
    parts = [
        _segment(name, held, profile, owned, size)
        for name, held in (("embedding", nodes[:begin]), *zip(names, chain), ("head", nodes[end:]))
    ]
    total = sum(part.parameters for part in parts)
    parts = [replace(part, saved=part.saved * width, boundary=part.boundary * width) for part in parts]
    first, *chain_parts, last = parts
    return CapturedCosts(profile.model, first, tuple(chain_parts), last, samples, total, fixed=fixed_us * 1e-6)


def _layer_keys(names: Sequence[str]) -> list[str | None]:
    """Return the numbered scope of every node that has one, else None.

    One list of scopes is taken, that with most members of those that hold much of the model (`encoder.layer.0`, …);
    where no list does, every first numbered scope is a layer (`layer1.0`, `layer1.1`, `layer2.0`, …).
    """
    places = [[match.span(1) for match in re.finditer(r"(?:^|(?<=\.))(\d+)(?=\.|$)", name)] for name in names]
    held: Counter[str] = Counter(name[:start] for name, spans in zip(names, places) for start, _ in spans)
    members: dict[str, set[str]] = {}
    for name, spans in zip(names, places):
        for start, end in spans:
            members.setdefault(name[:start], set()).add(name[start:end])
    able = [prefix for prefix in held if len(members[prefix]) > 1 and 2 * held[prefix] >= len(names)]
    if not able:
        return [name[: spans[0][1]] if spans else None for name, spans in zip(names, places)]
    prefix = max(able, key=lambda one: (len(members[one]), held[one]))
    ends = [next((end for start, end in spans if name[:start] == prefix), None) for name, spans in zip(names, places)]
    return [None if end is None else name[:end] for name, end in zip(names, ends)]


def _segment(name: str, nodes: Sequence[NodeCost], profile: Profile, owned: set[str], size: float) -> Segment:
    forward = sum(node.forward_ms for node in nodes) / 1e3
    backward = sum(node.backward_ms for node in nodes) / 1e3
    weight = sum(
        node.backward_ms * (_WEIGHT_SHARE if node.weight_share is None else node.weight_share)
        for node in nodes
        if node.parameter_mb
    ) / 1e3  # fmt: skip
    timed = sum(node.ms for node in nodes)
    sharded = sum(node.ms for node in nodes if node.flops and node.parameter_mb)
    fresh = {one for node in nodes for one in node.parameters} - owned
    owned |= fresh
    return Segment(
        name,
        forward,
        max(0.0, backward - weight),
        weight,
        sharded / timed if timed else 0.0,
        sum(profile.parameters_mb[one] for one in fresh) * _MEGA / size,
        profile.saved_mb(nodes) * _MEGA,
        nodes[-1].output_mb * _MEGA if nodes else 0.0,
        sum(node.forward_flops or node.flops / 3 for node in nodes),
        len(nodes),
    )


def _element_size(graph: Any) -> float:
    parameters = list(graph.bound_model().parameters())
    count = sum(one.numel() for one in parameters)
    return sum(one.numel() * one.element_size() for one in parameters) / count if count else 4.0
