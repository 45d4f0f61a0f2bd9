"""Stage interfaces: which values enter and leave every stage.

        call ──input_ids──► stage 0 ──hidden──► stage 1 ──hidden_2──► stage 2 ──► loss
                               └───────────── mask ─────────────────────┘

A value is sent directly from the stage that makes it to every stage that reads it. A stage that only needs the size of
a tensor receives the number. Parameters, buffers and other tensors of the model are no ports: every stage that reads
them holds them. Results that are inputs of the call, or tensors of the model, are no ports either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gemini.codegen.stage_reads import Reads, stage_reads
from gemini.codegen.value_names import Namer, UniqueNames
from gemini.ir.def_use import refs_of_read, tensor_reads
from gemini.ir.graph import Graph
from gemini.ir.node import TensorMeta
from gemini.ir.pytree import Number, Ref, leaves
from gemini.ir.symint import Expr
from gemini.partition.assignment import Partition


@dataclass(frozen=True)
class Port:
    """A value that enters or leaves a stage."""

    name: str  # a Python identifier, unique over the whole model: the keyword of the stage's forward
    value: Ref | Expr  # a tensor of the graph, or a number read from one
    source: int | None  # the stage that makes it; None: an argument of the call
    targets: tuple[int, ...]  # the stages that read it
    is_result: bool  # part of the model's output
    meta: TensorMeta | None  # None for numbers


@dataclass(frozen=True)
class Interface:
    """Inputs and outputs of one stage: the parameters of its forward, and its result (one bare, else a tuple)."""

    stage: int
    worker: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def interfaces(graph: Graph, partition: Partition) -> tuple[Interface, ...]:
    """Return the interface of every stage."""
    return interfaces_of(graph, partition, stage_reads(graph, partition), Namer(graph))


def interfaces_of(graph: Graph, partition: Partition, reads: list[Reads], namer: Namer) -> tuple[Interface, ...]:
    """Return the interfaces, from the reads of every stage."""
    targets: dict[Ref | Expr, set[int]] = {}
    for stage, found in enumerate(reads):
        for value in _entering_values(graph, partition, stage, found):
            targets.setdefault(value, set()).add(stage)
    results = set(_results(graph))
    ports = []
    names = UniqueNames()
    for value in _in_order(graph, {*targets, *results}):
        name = names.take(_name(namer, value))
        readers = tuple(sorted(targets.get(value, ())))
        ports.append(Port(name, value, _source(partition, value), readers, value in results, _meta(graph, value)))
    return tuple(
        Interface(
            stage,
            partition.workers[stage],
            tuple(port for port in ports if stage in port.targets),
            tuple(port for port in ports if port.source == stage),
        )
        for stage in range(partition.nstages)
    )


def _entering_values(graph: Graph, partition: Partition, stage: int, reads: Reads) -> Iterator[Ref | Expr]:
    """Return the values that a stage reads and does not make."""

    def foreign(ref: Ref) -> bool:
        node = graph.nodes[ref.node]
        return node.kind == "input" or (not node.is_source and partition.stage_of[ref.node] != stage)

    tensors = [ref for ref in reads.tensors if foreign(ref)]
    yield from tensors
    for number in reads.numbers:
        ref = number.operands[0]
        if foreign(ref) and ref not in reads.tensors:
            yield number


def _results(graph: Graph) -> Iterator[Ref | Expr]:
    for leaf in leaves(graph.result):
        values = [leaf] if isinstance(leaf, Ref) else tensor_reads(leaf.expr) if isinstance(leaf, Number) else ()
        for value in values:
            ref = value if isinstance(value, Ref) else value.operands[0]
            if not graph.nodes[ref.node].is_source:
                yield value


# ── a port ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _ref(value: Ref | Expr) -> Ref:
    return value if isinstance(value, Ref) else next(refs_of_read(value))


def _in_order(graph: Graph, values: set[Ref | Expr]) -> list[Ref | Expr]:
    """Order values: arguments of the call first, numbers after tensors, corresponding values of layers together."""

    def alike(value: Ref | Expr) -> tuple[bool, bool, str, str]:
        ref = _ref(value)
        node = graph.nodes[ref.node]
        name = node.name if node.kind == "input" else re.sub(r"(?<=\.)\d+(?=\.)", "*", node.name)
        return node.kind != "input", isinstance(value, Expr), name, str(ref.path)

    placed = sorted(values, key=lambda value: (_ref(value).node, str(value)))
    first: dict[tuple[bool, bool, str, str], int] = {}
    for at, value in enumerate(placed):
        first.setdefault(alike(value), at)
    return sorted(placed, key=lambda value: (*alike(value)[:2], first[alike(value)]))


def _source(partition: Partition, value: Ref | Expr) -> int | None:
    return partition.stage_of.get(_ref(value).node)


def _meta(graph: Graph, value: Ref | Expr) -> TensorMeta | None:
    if not isinstance(value, Ref):
        return None
    return graph.nodes[value.node].outputs.get((value.source, value.path))


def _name(namer: Namer, value: Ref | Expr) -> str:
    name = namer.of(_ref(value))
    if isinstance(value, Ref):
        return name
    dim = "_".join(str(part) for part in value.operands[1:])
    return f"{name}_{value.op}_{dim}".replace("-", "minus_").rstrip("_")
