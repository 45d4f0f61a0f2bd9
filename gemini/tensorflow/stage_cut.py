"""Stage cut: which stage of the pipeline runs each forward op and stores each variable, and the devices of the stages.

Ops that depend on a variable and on a source are the work. In the order of the graph they form items, which a
partitioner of the project distributes. Everything else follows: data with its first reader, a variable with the first
work on it, and what depends on variables alone with these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from gemini.errors import PartitionError
from gemini.tensorflow.forward_facts import ForwardFacts
from gemini.tensorflow.graph_branches import branch_owner
from gemini.tensorflow.piece_layouts import Shape
from gemini.tensorflow.split_way import ForwardOp

_ITEMS = 160  # at most
_BACKWARD = 2.0  # times the forward pass
_OPERATIONS_PER_MS = 2e7
_BYTES_PER_MS = 5e6
_OVERHEAD_MS = 0.004
_LOOP_TURNS = 30  # of a loop whose length is unknown
_ENTRY_BYTES = 4


@dataclass(frozen=True)
class StagePlacement:
    """The stage of every forward op by name; `devices` has the first device of every stage, `shards` all of them."""

    stage_of: dict[str, int]
    devices: tuple[str, ...]
    shards: tuple[tuple[str, ...], ...] = ()

    def __call__(self, name: str) -> tuple[int, str]:
        """Return the stage of an op and its device."""
        stage = self.stage_of.get(branch_owner(name), 0)
        return stage, self.devices[stage]

    def shard_devices(self, name: str) -> tuple[str, ...]:
        """Return the devices of the shards of an op."""
        return self.shards[self.stage_of.get(name, 0)]

    @property
    def is_sharded(self) -> bool:
        """Whether stages have several devices."""
        return any(len(devices) > 1 for devices in self.shards)


@dataclass(frozen=True)
class CutRequest:
    """The number of stages and the algorithm."""

    stages: int
    partitioner: str = "exact"
    micro_batches: int = 1
    memory_mb: float | None = None
    seed: int = 0


def cut_stages(facts: ForwardFacts, request: CutRequest) -> dict[str, int]:
    """Return the stage of every forward op; raises PartitionError where the graph has too little work."""
    work = [op for op in facts if set(op.outputs) & facts.tainted and set(op.outputs) & facts.trained]
    stage_of = dict.fromkeys((op.name for op in work), 0)
    if request.stages > 1:
        groups = _group(work)
        if len(groups) < request.stages:
            raise PartitionError(
                f"{len(groups)} parts of the graph depend on variables and data; {request.stages} stages are requested"
                f"\n    → pipeline_degree={max(1, len(groups))}"
            )
        for group, stage in zip(groups, _solve(facts, groups, request), strict=True):
            stage_of.update(dict.fromkeys((op.name for op in group), stage))
    _place_others(facts, stage_of)
    return stage_of


def _group(work: list[ForwardOp]) -> list[list[ForwardOp]]:
    """Return runs of ops of about equal time, at most `_ITEMS`."""
    limit = sum(map(forward_ms, work)) / _ITEMS
    groups: list[list[ForwardOp]] = []
    time = limit
    for op in work:
        cost = forward_ms(op)
        if time + cost > limit:
            groups.append([])
            time = 0.0
        groups[-1].append(op)
        time += cost
    return groups


def _solve(facts: ForwardFacts, groups: list[list[ForwardOp]], request: CutRequest) -> list[int]:
    from gemini.partition.partition_options import Options, Worker
    from gemini.partition.partition_problem import Edge, Item, Problem, Value
    from gemini.partition.registry import find_partitioner

    group_of = {name: at for at, group in enumerate(groups) for op in group for name in op.outputs}
    readers: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, float] = {}
    items = []
    for at, group in enumerate(groups):
        variables = {name for op in group for name in op.inputs if name in facts.trained and name not in facts.tainted}
        sizes.update((name, result_mb(name, facts.shape_of)) for name in variables)
        time = sum(map(forward_ms, group))
        saved = sum(result_mb(name, facts.shape_of) for op in group for name in op.outputs)
        items.append(Item(
            group[0].name, tuple(range(at, at + 1)), time * (1 + _BACKWARD), time, time * _BACKWARD,
            tuple(sorted(variables)), saved,
        ))  # fmt: skip
        for op in group:
            for name in op.inputs:
                if group_of.get(name, at) != at:
                    readers[name].add(at)
    order = sorted(readers)
    values = tuple(Value(*(result_mb(name, facts.shape_of),) * 2) for name in order)
    edges = [Edge(group_of[name], reader, at) for at, name in enumerate(order) for reader in sorted(readers[name])]
    workers = (Worker(memory_mb=request.memory_mb),) * request.stages
    options = Options(workers=workers, mixed=False, micro_batches=request.micro_batches, seed=request.seed)
    problem = Problem(tuple(items), tuple(edges), values, request.stages, options, sizes, frozenset(sizes))
    found = find_partitioner(request.partitioner)(problem)
    return _in_order(list(found.stage_of))


def _in_order(stages: list[int]) -> list[int]:
    """Number the stages by their first item."""
    number: dict[int, int] = {}
    for stage in stages:
        number.setdefault(stage, len(number))
    return [number[stage] for stage in stages]


def _place_others(facts: ForwardFacts, stage_of: dict[str, int]) -> None:
    """Place data with its first reader, variables likewise, and what depends on variables alone with them."""
    makers = {name: op.name for op in facts for name in op.outputs}
    first: dict[str, int] = {}
    for op in reversed(facts.ops):
        if op.name not in stage_of:
            stage_of[op.name] = first.get(op.name, 0)
        for name in op.inputs:
            if name in makers:
                first[makers[name]] = min(first.get(makers[name], stage_of[op.name]), stage_of[op.name])
    for op in facts:
        if set(op.outputs) & facts.trained and not set(op.outputs) & facts.tainted:
            stored = [stage_of[makers[name]] for name in op.inputs if name in facts.trained]
            stage_of[op.name] = max(stored, default=stage_of[op.name])


# ── costs ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def forward_ms(op: ForwardOp) -> float:
    """Return the time of the forward pass of an op; backward takes about twice as long."""
    moved = sum(prod(shape) for shape in (*op.in_shapes, *op.out_shapes) if shape is not None) * _ENTRY_BYTES
    loops = _LOOP_TURNS if op.type in ("While", "StatelessWhile") else 1
    return _OVERHEAD_MS + loops * (_operations(op) / _OPERATIONS_PER_MS + moved / _BYTES_PER_MS)


def result_mb(name: str, shape_of: Mapping[str, Shape | None]) -> float:
    """Return the size of a tensor in MB; 0 where it is unknown."""
    shape = shape_of.get(name)
    return 0.0 if shape is None else prod(shape) * _ENTRY_BYTES / (1 << 20)


def _operations(op: ForwardOp) -> float:
    out = op.out_shapes[0] if op.out_shapes else None
    if out is None or not op.in_shapes or op.in_shapes[0] is None:
        return 0.0
    if op.type == "MatMul":
        return 2.0 * prod(out) * op.in_shapes[0][0 if op.flag("transpose_a") else 1]
    if op.type.startswith("BatchMatMul"):
        return 2.0 * prod(out) * op.in_shapes[0][-2 if op.flag("adj_x") else -1]
    if op.type == "Einsum":
        return 2.0 * prod(out) * op.in_shapes[0][-1]
    if op.type in ("Conv2D", "Conv3D") and op.in_shapes[1] is not None:
        return 2.0 * prod(out) * prod(op.in_shapes[1][:-1])
    if op.type in ("While", "StatelessWhile"):  # products of the state with the weights that it reads
        return sum(2.0 * prod(shape) for shape in op.in_shapes if shape is not None and len(shape) == 2)
    return 0.0
