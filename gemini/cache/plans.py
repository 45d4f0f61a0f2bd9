"""Kept plans: what was measured and chosen for a model serves its later runs.

One JSON file a plan, with the profile, the partition, the analysis and the schedule, under a key of all that decides
about them: the graph, the classes of its nodes (`profiling.signature`), what is wished for, the machine, versions and
our own code. A file is believed only if it is whole, is of this format, names the very key and fits the graph; any
other is passed over with one line, and written anew. Files come into their place in one step, so that runs that share a
folder see whole ones.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gemini
from gemini.atomic_files import write_whole
from gemini.errors import ArtifactError, GeminiError
from gemini.log import tell
from gemini.partition.analysis.analysis_result import Analysis
from gemini.partition.assignment import Partition
from gemini.planner.schedule_choice import Choice
from gemini.profiling.profile_result import Profile

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.planner.plan_request import PlanRequest

FORMAT = 3
_MOST = 64  # plans that are kept
_DECIDING = ("batch_analysis", "capture", "ir", "partition", "planner", "profiling", "schedule", "snapshot")

Found = tuple[Profile, Choice]


def kept_or_made(
    graph: Graph, request: PlanRequest, micro_batches: int, pieces: float, make: Callable[[], Found],
    *, tail: tuple[int, ...] | None = None,
) -> tuple[Profile, Choice, bool]:  # fmt: skip
    """Profile and choice for a graph, and whether they had been kept. What `make` gives is kept for later runs.

    `tail`: the nodes that are to see the whole batch, where the loss does.
    """
    folder = _folder(request)
    if folder is None or request.is_from_file:
        return *make(), False
    key = plan_key(graph, request, micro_batches, pieces, tail)
    path = folder / f"{key}.json"
    try:
        found = _read(path, key, graph)
    except (GeminiError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = None
        if not request.quiet:
            reason = (str(error) or type(error).__name__).partition("\n")[0]
            tell(f"gemini: a kept plan is not used: {path}: {reason:.200}")
    if found is not None:
        return *found, True
    made = make()
    _write(path, key, *made)
    return *made, False


def keep(graph: Graph, request: PlanRequest, micro_batches: int, pieces: float, found: Found) -> None:
    """Have later runs begin with this."""
    folder = _folder(request)
    if folder is not None:
        key = plan_key(graph, request, micro_batches, pieces)
        _write(folder / f"{key}.json", key, *found)


def _folder(request: PlanRequest) -> Path | None:
    from gemini.profiling.profile_cache import default_folder

    if not request.cache:
        return None
    return (default_folder().parent if request.cache is True else Path(request.cache)) / "plans"


# ── the key ────────────────────────────────────────────────────────────────────────────────────────────────────────
def plan_key(
    graph: Graph, request: PlanRequest, micro_batches: int, pieces: float, tail: tuple[int, ...] | None = None
) -> str:
    """A text that differs where another plan might be made."""
    from gemini.pipe.manifest import versions

    facts = [
        FORMAT,
        versions(),
        _own_code(),
        _machine(graph),
        request.key_facts(),
        micro_batches,
        pieces,
        tail,
    ]
    return hashlib.sha256(repr([*facts, *_graph_facts(graph)]).encode()).hexdigest()[:32]


def _graph_facts(graph: Graph) -> list[Any]:
    from gemini.profiling.cost_signature import class_of
    from gemini.profiling.gradient_flow import GradientFlow

    model, flow = graph.bound_model(), GradientFlow(graph)
    places: dict[int, int] = {}
    held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [
        graph.model_name,
        [(name, tuple(one.shape), str(one.dtype), one.requires_grad, places.setdefault(id(one), len(places)))
         for name, one in held],
        [(node.id, node.kind, node.target, node.name, node.dependencies, repr(node.mutates), node.shares, node.changes,
          node.random, node.checkpoint, repr(node.region), repr(sorted(node.outputs.items(), key=repr)))
         for node in graph.nodes],
        [class_of(graph, node, flow) for node in graph.compute_nodes],
    ]  # fmt: skip


def _machine(graph: Graph) -> list[Any]:
    import torch

    from gemini.profiling.measured_device import find_device

    model = graph.bound_model()
    home = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    return [find_device(home).describe(), os.cpu_count(), len(os.sched_getaffinity(0))]


@functools.lru_cache(maxsize=1)
def _own_code() -> str:
    """Whoever changes how plans are made gets fresh ones."""
    home, found = Path(gemini.__file__).parent, hashlib.sha256()
    for package in _DECIDING:
        for path in sorted((home / package).rglob("*.py")):
            found.update(str(path.relative_to(home)).encode() + path.read_bytes())
    return found.hexdigest()


# ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _read(path: Path, key: str, graph: Graph) -> Found | None:
    """What a file says; None where there is none, an error where it is not to be believed."""
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
        raise ArtifactError("it is the plan of something else")
    body = data["plan"]
    if data["hash"] != _hash(body):
        raise ArtifactError("it is damaged: its hash is another")
    profile, partition = Profile.from_json(body["profile"]), Partition.from_json(body["partition"])
    partition.validate(graph)
    if [node.id for node in profile.nodes] != [node.id for node in graph.compute_nodes]:
        raise ArtifactError("it is the plan of another graph")
    schedule = from_field(Field(str(path), "schedule", body["schedule"]))
    analysis = replace(Analysis.from_json(body["analysis"]), graph=graph, plan=schedule)
    with suppress(OSError):
        os.utime(path)  # the least recently used goes first
    return profile, Choice(partition, analysis, schedule, bool(body["recompute"]))


def _write(path: Path, key: str, profile: Profile, choice: Choice) -> None:
    """Keep a plan; that it cannot be written is no error."""
    from gemini.schedule import plan_files

    body = {
        "profile": profile.to_json(),
        "partition": choice.partition.to_json(),
        "analysis": choice.analysis.to_json(),
        "recompute": choice.recompute,
        "schedule": {"format": plan_files.FORMAT, "version": plan_files.VERSION, **plan_files.to_dict(choice.plan)},
    }
    try:
        body = json.loads(json.dumps(body))  # as it will be read
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"gemini plan": FORMAT, "key": key, "hash": _hash(body), "plan": body}))
        kept = sorted(path.parent.glob("*.json"), key=_age)
        for old in kept[:-_MOST]:
            old.unlink(missing_ok=True)
    except (GeminiError, OSError, ValueError, TypeError):
        return


def _hash(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another run has removed it
        return 0.0
