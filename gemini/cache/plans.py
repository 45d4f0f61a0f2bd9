"""Plan cache: profile, partition, analysis and schedule of a graph, for later runs.

One JSON file per plan, under a key of everything that decides about it: the graph, the cost signatures of its nodes,
the request, the machine, versions, and the code of this package. An entry is used only if it is complete, of this
format, carries its own key and fits the graph; any other is logged once and written again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gemini
from gemini.cache_files import evict_oldest, hash_facts, mark_used, software_versions, write_entry
from gemini.errors import ArtifactError, GeminiError
from gemini.log import log_line
from gemini.partition.analysis.analysis_result import Analysis
from gemini.partition.assignment import Partition
from gemini.profiling.profile_result import Profile

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.schedule.schedplan import SchedPlan

FORMAT = 3
_LIMIT = 64  # entries
_PACKAGES_IN_KEY = ("batch_analysis", "capture", "ir", "partition", "planner", "profiling", "schedule", "snapshot")


@dataclass(frozen=True)
class CachedPlan:
    """The part of a step plan that measurement and search have found."""

    profile: Profile
    partition: Partition
    analysis: Analysis
    schedule: SchedPlan
    recompute: bool = False  # stages recompute their activations in backward


def load_or_build(
    graph: Graph, request_facts: Sequence[Any], folder: Path | None, build: Callable[[], CachedPlan], *, quiet: bool
) -> tuple[CachedPlan, bool]:
    """Return the plan of a graph, and whether it came from the cache; without one, build and store it.

    `request_facts` are the facts beside the graph that decide about the plan.
    """
    if folder is None:
        return build(), False
    key = plan_key(graph, request_facts)
    path = folder / f"{key}.json"
    try:
        found = _read(path, key, graph)
    except (GeminiError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = None
        if not quiet:
            reason = (str(error) or type(error).__name__).partition("\n")[0]
            log_line(f"gemini: cached plan not used: {path}: {reason:.200}")
    if found is not None:
        return found, True
    built = build()
    _write(path, key, built)
    return built, False


def store(graph: Graph, request_facts: Sequence[Any], folder: Path | None, plan: CachedPlan) -> None:
    """Store a plan for later runs."""
    if folder is not None:
        key = plan_key(graph, request_facts)
        _write(folder / f"{key}.json", key, plan)


# ── the key ────────────────────────────────────────────────────────────────────────────────────────────────────────
def plan_key(graph: Graph, request_facts: Sequence[Any]) -> str:
    """Return a text that differs where another plan might be built."""
    return hash_facts(
        [FORMAT, software_versions(), _hash_code(), _machine_facts(graph), *request_facts, *_graph_facts(graph)]
    )


def graph_key(graph: Graph) -> str:
    """Return a text that differs where a model or the shapes of a call do."""
    return hash_facts(_graph_facts(graph))


def _graph_facts(graph: Graph) -> list[Any]:
    from gemini.profiling.cost_signature import node_class_signature
    from gemini.profiling.gradient_flow import GradientFlow

    model, flow = graph.bound_model(), GradientFlow(graph)
    first: dict[int, int] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [
        graph.model_name,
        [(name, tuple(one.shape), str(one.dtype), one.requires_grad, first.setdefault(id(one), len(first)))
         for name, one in tensors],
        [(node.id, node.kind, node.target, node.name, node.dependencies, repr(node.mutates), node.shares, node.changes,
          node.random, node.checkpoint, node.recomputed, repr(node.region),
          repr(sorted(node.outputs.items(), key=repr)))
         for node in graph.nodes],
        [node_class_signature(graph, node, flow) for node in graph.compute_nodes],
    ]  # fmt: skip


def _machine_facts(graph: Graph) -> list[Any]:
    import torch

    from gemini.profiling.measured_device import find_device

    model = graph.bound_model()
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    return [find_device(device).describe(), os.cpu_count(), len(os.sched_getaffinity(0))]


@functools.lru_cache(maxsize=1)
def _hash_code() -> str:
    """Hash the packages that build plans, so that a change of their code invalidates every entry."""
    root, found = Path(gemini.__file__).parent, hashlib.sha256()
    for package in _PACKAGES_IN_KEY:
        for path in sorted((root / package).rglob("*.py")):
            found.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return found.hexdigest()


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _read(path: Path, key: str, graph: Graph) -> CachedPlan | None:
    """Read an entry; None where there is none; raises where it cannot be trusted."""
    from gemini.schedule.json_reader import Field
    from gemini.schedule.plan_files import from_field

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    data = json.loads(text)
    if not isinstance(data, dict) or data.get("gemini plan") != FORMAT:
        raise ArtifactError(f"not a plan of format {FORMAT}")
    if data["key"] != key:
        raise ArtifactError("it has another key")
    body = data["plan"]
    if data["hash"] != _hash_body(body):
        raise ArtifactError("it is damaged: its hash does not match")
    profile, partition = Profile.from_json(body["profile"]), Partition.from_json(body["partition"])
    partition.validate(graph)
    if [node.id for node in profile.nodes] != [node.id for node in graph.compute_nodes]:
        raise ArtifactError("it is the plan of another graph")
    schedule = from_field(Field(str(path), "schedule", body["schedule"]))
    analysis = replace(Analysis.from_json(body["analysis"]), graph=graph, plan=schedule)
    mark_used(path)
    return CachedPlan(profile, partition, analysis, schedule, bool(body["recompute"]))


def _write(path: Path, key: str, plan: CachedPlan) -> None:
    from gemini.schedule import plan_files

    body = {
        "profile": plan.profile.to_json(),
        "partition": plan.partition.to_json(),
        "analysis": plan.analysis.to_json(),
        "recompute": plan.recompute,
        "schedule": {"format": plan_files.FORMAT, "version": plan_files.VERSION, **plan_files.to_dict(plan.schedule)},
    }
    try:
        body = json.loads(json.dumps(body))  # the hash is over the values as they are read back
        text = json.dumps({"gemini plan": FORMAT, "key": key, "hash": _hash_body(body), "plan": body})
    except (ValueError, TypeError):
        return
    write_entry(path, text)
    evict_oldest(path.parent, _LIMIT)


def _hash_body(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
