"""Partition: cut a profiled graph into stages, balanced over workers.

The problem and the partitioners that solve it (`partition_problem`, `registry`) import no framework; so the names below
are imported on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gemini.partition.analysis.analysis_builder import analyse
    from gemini.partition.analysis.analysis_result import Analysis
    from gemini.partition.assignment import Partition
    from gemini.partition.entry import partition
    from gemini.partition.partition_options import Options, Worker
    from gemini.partition.partitioner_comparison import Comparison, compare

__all__ = ["Analysis", "Comparison", "Options", "Partition", "Worker", "analyse", "compare", "partition"]

_MODULES = {
    "Analysis": "analysis.analysis_result",
    "Comparison": "partitioner_comparison",
    "Options": "partition_options",
    "Partition": "assignment",
    "Worker": "partition_options",
    "analyse": "analysis.analysis_builder",
    "compare": "partitioner_comparison",
    "partition": "entry",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
