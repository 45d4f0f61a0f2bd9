"""`generate(graph, partition)`: from a partitioned graph to the source of every stage."""

from __future__ import annotations

from dataclasses import dataclass

from gemini.capture.graph import Graph
from gemini.codegen.binding import Bindings
from gemini.codegen.body import Body
from gemini.codegen.imports import Imports
from gemini.codegen.interface import Interface, interfaces_of
from gemini.codegen.liveness import Liveness
from gemini.codegen.naming import RESERVED, Namer
from gemini.codegen.paths import Paths
from gemini.codegen.program import Item, Statement
from gemini.codegen.reading import Reads, stage_reads
from gemini.codegen.skeleton import Skeleton, skeletons
from gemini.codegen.stage_file import stage_source
from gemini.codegen.statements import Statements
from gemini.codegen.steps import stage_steps
from gemini.partition.partition import Partition


@dataclass(frozen=True)
class StageCode:
    """One generated stage."""

    interface: Interface
    class_name: str  # "Stage0"
    source: str  # the text of stage_0.py
    parameters: tuple[str, ...]  # original names of the parameters this stage holds, aliases of tied ones included
    buffers: tuple[str, ...]


def generate(graph: Graph, partition: Partition) -> tuple[StageCode, ...]:
    """The stages of a partitioned graph as Python sources."""
    partition.validate(graph)
    reads, namer = stage_reads(graph, partition), Namer(graph)
    made = interfaces_of(graph, partition, reads, namer)
    held = skeletons(graph, partition, reads)
    return tuple(
        _stage(graph, partition, reads, namer, interface, skeleton)
        for interface, skeleton in zip(made, held, strict=True)
    )


def _stage(
    graph: Graph, partition: Partition, reads: list[Reads], namer: Namer, interface: Interface, skeleton: Skeleton
) -> StageCode:
    steps = stage_steps(graph, partition, reads, interface)
    items: list[Item] = [Statement((step,)) for step in steps]
    imports = Imports(port.name for port in interface.inputs)
    _lines(graph, namer, interface, skeleton, items, imports)  # finds what is imported, whose names are then taken
    body = _lines(graph, namer, interface, skeleton, items, imports)
    source = stage_source(graph, partition, interface, skeleton, imports, body)
    return StageCode(interface, f"Stage{interface.stage}", source, skeleton.parameter_names(), skeleton.buffer_names())


def _lines(
    graph: Graph, namer: Namer, interface: Interface, skeleton: Skeleton, items: list[Item], imports: Imports
) -> list[str]:
    bindings = Bindings(graph, namer, interface, items)
    liveness = Liveness(items, bindings, {*RESERVED, *imports.names.values(), *imports.modules})
    statements = Statements(graph, bindings, imports, Paths(skeleton))
    lines = Body(graph, statements, liveness).write(items)
    results = [statements.result(port.value) for port in interface.outputs]
    return [*lines, f"return {', '.join(results) or '()'}"]
