"""Registry of partitioners: the built-in ones and those of installed packages.

A partitioner is a function from a problem to an `Assignment`. A package adds one through an entry point of the group
`gemini.partitioners`:

    [project.entry-points."gemini.partitioners"]
    mine = "mylib.cut:my_partitioner"
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from gemini.errors import PartitionError
from gemini.nearest_name import nearest
from gemini.partition.partition_problem import Problem

GROUP = "gemini.partitioners"

BUILT_IN = {
    "exact": "gemini.partition.exact.exact_partitioner:partition_exact",
    "mpipe": "gemini.partition.mpipe.mpipe_partitioner:partition_mpipe",
    "metis": "gemini.partition.metis.metis_partitioner:partition_metis",
    "acyclic": "gemini.partition.acyclic:partition_acyclic",
    "multilevel": "gemini.partition.multilevel:partition_multilevel",
    "pipedream": "gemini.partition.pipedream.pipedream_partitioner:partition_pipedream",
}


@dataclass(frozen=True)
class Assignment:
    """The result of a partitioner: the stage of each item, and the worker of each stage.

    Stages need not be numbered in order nor all be used: the caller sorts them. The graph of stages must be acyclic.
    """

    stage_of: tuple[int, ...]
    worker_of: tuple[int, ...]
    facts: dict[str, Any] = field(default_factory=dict)


Partitioner = Callable[[Problem], Assignment]


def partitioners() -> dict[str, str]:
    """Return name → `module:function` of all installed partitioners."""
    return {**{point.name: point.value for point in entry_points(group=GROUP)}, **BUILT_IN}


def find_partitioner(name: str) -> Partitioner:
    """Load a partitioner by name; raises PartitionError listing the valid names."""
    known = partitioners()
    if name not in known:
        near = nearest(name, sorted(known))
        hint = f"did you mean {near!r}? " if near else ""
        raise PartitionError(f"unknown partitioner {name!r}\n    → {hint}choose from {', '.join(known)}")
    module, _, attribute = known[name].partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PartitionError(f"partitioner {name!r} cannot be loaded from {known[name]}: {error}") from error
    return found  # type: ignore[no-any-return]
