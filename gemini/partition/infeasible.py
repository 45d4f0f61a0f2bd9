"""Infeasible problems: explain why no partition exists, and what would make one possible.

Before a search: more parts than items, pins that no order of stages can satisfy. After a failed search, or a result
that does not fit: the missing memory, and remedies that were checked to work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gemini.errors import PartitionError
from gemini.partition.partition_problem import Problem

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.profiling.profile_result import Profile

_SHOWN = 8


def check_limits(graph: Graph, problem: Problem) -> None:
    """Raise PartitionError with all faults where no partitioner can succeed."""
    faults = []
    working = [item for item in problem.items if item.ms > 0] or list(problem.items)
    if problem.nparts > len(working):
        faults.append(_too_many_parts_text(graph, problem, len(working)))
    if problem.options.mixed is False:
        faults += contradictory_pins(problem)
    if faults:
        raise PartitionError("\n".join(faults))


# ── too many parts ───────────────────────────────────────────────────────────────────────────────────────────────────
def _too_many_parts_text(graph: Graph, problem: Problem, most: int) -> str:
    text = f"{graph.model_name} cannot be cut into {problem.nparts} parts: {most} is the most"
    if graph.is_whole:
        return (
            f"{text}, because it could only be captured as one node: {graph.blocks['']}\n    → train it on one device"
        )
    reasons = [*_whole_reasons(graph), *_colocation_reasons(graph, problem)]
    listed = "".join(f"\n  - {reason}" for reason in reasons[:_SHOWN])
    if len(reasons) > _SHOWN:
        listed += f"\n  - and {len(reasons) - _SHOWN} more"
    remedies = [f"request {most} parts or fewer"] + [
        text
        for applies, text in (
            (problem.options.tied == "together", 'synchronise tied weights (tied="sync")'),
            (problem.options.together or problem.options.uncut, "relax the constraints `together` and `uncut`"),
            (graph.settings.get("depth") is not None, "capture with a greater depth"),
        )
        if applies
    ]
    return f"{text}{listed}\n    → {', or '.join(remedies)}"


def _whole_reasons(graph: Graph) -> Iterator[str]:
    for scope, reason in (*graph.blocks.items(), *graph.calls.items()):
        yield f"{scope or 'the model'} is not divided: {reason}"


def _colocation_reasons(graph: Graph, problem: Problem) -> Iterator[str]:
    options = problem.options
    for item in sorted(problem.items, key=lambda item: -len(item.nodes)):
        if len(item.nodes) < 2:
            return
        why = "in-place writes share a stage with the node that allocated the memory"
        if options.tied == "together" and _has_tied_weights(graph, item.nodes):
            why = 'nodes with tied weights share a stage (tied="together")'
        elif options.together or options.uncut:
            why = "constrained to one stage by `together` or `uncut`, or on a path between such nodes"
        yield f"{len(item.nodes)} nodes from {item.name} to {graph.nodes[item.nodes[-1]].name} share a stage: {why}"


def _has_tied_weights(graph: Graph, nodes: Sequence[int]) -> bool:
    from gemini.profiling.node_tensors import model_tensors

    users: dict[int, int] = {}
    for node in nodes:
        for tensor in model_tensors(graph, graph.bound_model(), graph.nodes[node]):
            users[id(tensor)] = users.get(id(tensor), 0) + 1
    return any(count > 1 for count in users.values())


# ── pins ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def contradictory_pins(problem: Problem) -> list[str]:
    """Describe pins that one stage per worker cannot satisfy, since their parts depend on each other."""
    import networkx as nx

    depends = nx.DiGraph()
    witness: list[dict[int, int]] = []  # of each item: for every part before it, an item pinned to that part
    for at, item in enumerate(problem.items):
        before: dict[int, int] = {}
        for one in problem.predecessors[at]:
            before |= witness[one]
            pin = problem.items[one].pin
            if pin is not None:
                before[pin] = one
        witness.append(before)
        if item.pin is not None:
            for part, source in before.items():
                if part != item.pin and not depends.has_edge(part, item.pin):
                    depends.add_edge(part, item.pin, source=source, target=at)
    faults = []
    for cycle in nx.simple_cycles(depends, length_bound=problem.nparts):
        pairs = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        steps = [
            f"{problem.items[edge['target']].name} (part {after}) needs {problem.items[edge['source']].name} "
            f"(part {before})"
            for before, after in pairs
            for edge in (depends.edges[before, after],)
        ]
        faults.append(
            "pins contradict each other with one stage per worker: " + "; ".join(steps) + "\n"
            "    → pin other scopes, or allow several stages per worker (mixed=True)"
        )
        if len(faults) == _SHOWN:
            break
    return faults


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def check_memory(problem: Problem, stages: Sequence[Sequence[int]], workers: Sequence[int]) -> None:
    """Raise PartitionError where the stages of a worker exceed its memory."""
    used = problem.worker_memory_mb(stages, workers)
    faults = [
        f"  - worker {at} needs {mb:.1f} MB and has {worker.memory_mb:.1f} MB: {mb - worker.memory_mb:.1f} MB too much"
        for at, (mb, worker) in enumerate(zip(used, problem.workers, strict=True))
        if worker.memory_mb is not None and mb > worker.memory_mb * (1 + 1e-6)
    ]
    if faults:
        raise PartitionError("the stages do not fit the memory of their workers:\n" + "\n".join(faults))


def explain_failure(error: PartitionError, graph: Graph, profile: Profile, problem: Problem) -> PartitionError:
    """Return the error of a partitioner or, where memory is short, one with the missing amount and remedies."""
    if not problem.has_memory_limits:
        return error
    from gemini.partition.memory_shortage import explain_shortage

    text = explain_shortage(graph, profile, problem)
    return PartitionError(text) if text else error
