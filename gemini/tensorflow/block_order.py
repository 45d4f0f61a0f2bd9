"""Block order: the order of a schedule plan as control edges between the blocks of a twin.

    device 0   F0/S0 ─→ F1/S0 ─→ B0/S0 ─→ …       every ─→ is one op without data: after all of a block whose results
    device 1   F0/S1 ─→ B0/S1 ─→ F1/S1 ─→ …       leave it, before all of the next that read nothing of their own

Batch statistics and other joins of micro-batches tie blocks together. Where a plan contradicts them, first all forward
blocks and then all backward blocks are ordered; where this does too, TensorFlow orders them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from gemini.schedule.schedplan import SchedPlan
from gemini.tensorflow.stage_schedule import StageSchedule
from gemini.tensorflow.twin_graph import Block, TwinGraph

_KINDS = {FORWARD: "F", BACKWARD: "B", INPUT_GRADIENT: "I", WEIGHT_GRADIENT: "W"}
Orders = list[list[Block]]


def order_blocks(twin: TwinGraph, graph: Any, schedule: StageSchedule) -> str:
    """Order the blocks of a twin on each device; return the name of the order that holds."""
    count = twin.plan.count
    plan = schedule.first(count) if count > 1 else None
    if plan is None:
        return "none"
    blocks = dict(twin.block_of)
    if any(block.btype == WEIGHT_GRADIENT for block in plan):
        _split_backward(graph, blocks)
    members: dict[Block, list[Any]] = defaultdict(list)
    for name, block in blocks.items():
        members[block].append(graph.get_operation_by_name(name))
    orders = {schedule.name: _orders(plan, schedule), "gpipe": _forward_first(plan, schedule)}
    for name, found in orders.items():
        present = [[block for block in order if block in members] for order in found]
        if _is_acyclic(members, present, twin, graph):
            for order in present:
                _add_edges(graph, [members[block] for block in order], twin.prefix)
            return name
    return "none"


def _orders(plan: SchedPlan, schedule: StageSchedule) -> Orders:
    return [
        [(_KINDS.get(block.btype, "?"), block.mid, block.stage or 0) for block in plan.device_blocks(device)]
        for device in range(schedule.devices)
    ]


def _forward_first(plan: SchedPlan, schedule: StageSchedule) -> Orders:
    return [sorted(order, key=lambda block: block[0] != "F") for order in _orders(plan, schedule)]


def _split_backward(graph: Any, blocks: dict[str, Block]) -> None:
    """Make two blocks of every backward block: what earlier stages need, and gradients of weights."""
    by_block: dict[Block, set[str]] = defaultdict(set)
    for name, block in blocks.items():
        if block[0] == "B":
            by_block[block].add(name)
    backward = {name for names in by_block.values() for name in names}
    for (_, piece, stage), names in by_block.items():
        needed = [
            name
            for name in names
            for tensor in graph.get_operation_by_name(name).outputs
            if any(reader.name in backward and reader.name not in names for reader in tensor.consumers())
        ]
        inner: set[str] = set()
        while needed:
            name = needed.pop()
            if name in names and name not in inner:
                inner.add(name)
                op = graph.get_operation_by_name(name)
                needed += [one.name for one in (*(tensor.op for tensor in op.inputs), *op.control_inputs)]
        for name in names:
            blocks[name] = ("I" if name in inner else "W", piece, stage)


def _is_acyclic(members: dict[Block, list[Any]], orders: Orders, twin: TwinGraph, graph: Any) -> bool:
    """Whether the ops have an order once every block follows the one in front of it on its device."""
    ops = [op for op in graph.get_operations() if op.name.startswith(twin.prefix)]
    places: dict[str, int] = {op.name: at for at, op in enumerate(ops)}
    after: list[list[int]] = [[] for _ in ops]
    before = [0] * len(ops)

    def edge(source: int, target: int) -> None:
        after[source].append(target)
        before[target] += 1

    for at, op in enumerate(ops):
        for one in (*(tensor.op for tensor in op.inputs), *op.control_inputs):
            if one.name in places:
                edge(places[one.name], at)
    for order in orders:
        for one, other in pairwise(order):
            gate = len(after)
            after.append([])
            before.append(0)
            for op in members[one]:
                edge(places[op.name], gate)
            for op in _entries(members[other]):
                edge(gate, places[op.name])
    ready = [at for at, count in enumerate(before) if not count]
    done = 0
    while ready:
        done += 1
        for target in after[ready.pop()]:
            before[target] -= 1
            if not before[target]:
                ready.append(target)
    return done == len(after)


def _entries(ops: Sequence[Any]) -> Iterable[Any]:
    """Return the ops of a block that read nothing of the block."""
    names = {op.name for op in ops}
    return [op for op in ops if not any(tensor.op.name in names for tensor in op.inputs)]


def _exits(ops: Sequence[Any]) -> Iterable[Any]:
    """Return the ops of a block that nothing of the block reads."""
    read = {tensor.op.name for op in ops for tensor in op.inputs}
    return [op for op in ops if op.name not in read]


def _add_edges(graph: Any, blocks: Sequence[Sequence[Any]], prefix: str) -> None:
    import tensorflow.compat.v1 as tf

    for one, other in pairwise(blocks):
        device = next((op.device for op in other if op.device), "")
        with graph.as_default(), graph.device(None), graph.device(device), tf.control_dependencies(_exits(one)):
            gate = tf.no_op(name=f"{prefix}order")
        for op in _entries(other):
            op._add_control_input(gate)
