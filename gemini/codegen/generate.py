"""`generate(graph, partition)`: from a partitioned graph to the source of every stage."""

from __future__ import annotations

from dataclasses import dataclass

from gemini.capture.graph import Graph
from gemini.codegen.interface import Interface
from gemini.errors import GenerateError
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
    raise GenerateError(f"{graph.model_name} in {partition.nstages} stages: under construction")
