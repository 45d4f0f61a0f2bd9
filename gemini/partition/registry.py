"""Where partitioners come from: Gemini's own table, and packages that bring more.

A partitioner is a function of a problem to an `Assignment`. A package adds one through an entry point of the group
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
    """What a partitioner answers: the stage of each item, and the worker of each stage.

    Stages need not be numbered in order nor be all used: the result is put in order afterwards. Along every edge the
    stages must be such that stages can be put in an order in which values flow forward.
    """

    stage_of: tuple[int, ...]
    worker_of: tuple[int, ...]
    facts: dict[str, Any] = field(default_factory=dict)


Partitioner = Callable[[Problem], Assignment]


def partitioners() -> dict[str, str]:
    """Name → `module:function` of all that can be had."""
    return {**{point.name: point.value for point in entry_points(group=GROUP)}, **BUILT_IN}


def find_partitioner(name: str) -> Partitioner:
    """The partitioner of a name; raises PartitionError listing those that exist."""
    known = partitioners()
    if name not in known:
        near = nearest(name, sorted(known))
        hint = f"did you mean {near!r}? " if near else ""
        raise PartitionError(f"unknown partitioner {name!r}\n    → {hint}there are {', '.join(known)}")
    module, _, attribute = known[name].partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PartitionError(f"partitioner {name!r} cannot be loaded from {known[name]}: {error}") from error
    return found  # type: ignore[no-any-return]
