"""Limits: what cannot be had is said, with what could be had instead.

Before a search: more parts than there are pieces, pins that no order of stages can serve. After one that failed, or
whose answer does not fit: how much memory is missing where, and what would do.
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
    """Raise PartitionError where no partitioner could succeed; all faults at once."""
    faults = []
    working = [item for item in problem.items if item.ms > 0] or list(problem.items)
    if problem.nparts > len(working):
        faults.append(_too_many(graph, problem, len(working)))
    if problem.options.mixed is False:
        faults += contradictory_pins(problem)
    if faults:
        raise PartitionError("\n".join(faults))


# ── too many parts ─────────────────────────────────────────────────────────────────────────────────────────────────
def _too_many(graph: Graph, problem: Problem, most: int) -> str:
    text = f"{graph.model_name} cannot be cut into {problem.nparts} parts: {most} is the most"
    if graph.is_whole:
        return f"{text}, because it had to be captured whole: {graph.blocks['']}\n    → train it on one device"
    reasons = [*_whole(graph), *_held_together(graph, problem)]
    listed = "".join(f"\n  - {reason}" for reason in reasons[:_SHOWN])
    if len(reasons) > _SHOWN:
        listed += f"\n  - and {len(reasons) - _SHOWN} more"
    remedies = [f"ask for {most} parts or fewer"] + [
        text
        for asked, text in (
            (problem.options.tied == "together", 'let tied weights be synchronised (tied="sync")'),
            (problem.options.together or problem.options.uncut, "ask for less to stay together"),
            (graph.settings.get("depth") is not None, "capture with a greater depth"),
        )
        if asked
    ]
    return f"{text}{listed}\n    → {', or '.join(remedies)}"


def _whole(graph: Graph) -> Iterator[str]:
    for scope, reason in (*graph.blocks.items(), *graph.calls.items()):
        yield f"{scope or 'the model'} stays whole: {reason}"


def _held_together(graph: Graph, problem: Problem) -> Iterator[str]:
    options = problem.options
    for item in sorted(problem.items, key=lambda item: -len(item.nodes)):
        if len(item.nodes) < 2:
            return
        why = "what writes memory stays with what made it"
        if options.tied == "together" and _ties(graph, item.nodes):
            why = 'weights that they share are kept together (tied="together")'
        elif options.together or options.uncut:
            why = "asked to stay together, or on the way between such nodes"
        yield f"{len(item.nodes)} nodes from {item.name} to {graph.nodes[item.nodes[-1]].name} share a stage: {why}"


def _ties(graph: Graph, nodes: Sequence[int]) -> bool:
    from gemini.profiling.node_tensors import held_tensors

    users: dict[int, int] = {}
    for node in nodes:
        for tensor in held_tensors(graph, graph.bound_model(), graph.nodes[node]):
            users[id(tensor)] = users.get(id(tensor), 0) + 1
    return any(count > 1 for count in users.values())


# ── pins ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def contradictory_pins(problem: Problem) -> list[str]:
    """Pins that one stage a worker cannot serve, since their parts would need each other."""
    import networkx as nx

    needs = nx.DiGraph()
    witness: list[dict[int, int]] = []  # of each item: for every part before it, an item pinned there
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
                if part != item.pin and not needs.has_edge(part, item.pin):
                    needs.add_edge(part, item.pin, source=source, target=at)
    faults = []
    for circle in nx.simple_cycles(needs, length_bound=problem.nparts):
        pairs = zip(circle, [*circle[1:], circle[0]], strict=True)
        steps = [
            f"{problem.items[edge['target']].name} (part {after}) needs {problem.items[edge['source']].name} "
            f"(part {before})"
            for before, after in pairs
            for edge in (needs.edges[before, after],)
        ]
        faults.append(
            "pins contradict each other where a worker has one stage: " + "; ".join(steps) + "\n"
            "    → pin other scopes, or allow several stages a worker (mixed=True)"
        )
        if len(faults) == _SHOWN:
            break
    return faults


# ── memory ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def check_memory(problem: Problem, stages: Sequence[Sequence[int]], workers: Sequence[int]) -> None:
    """Raise PartitionError where workers would need more memory than they have."""
    used = problem.memories(stages, workers)
    faults = [
        f"  - worker {at} needs {mb:.1f} MB and has {worker.memory_mb:.1f} MB: {mb - worker.memory_mb:.1f} MB too much"
        for at, (mb, worker) in enumerate(zip(used, problem.workers, strict=True))
        if worker.memory_mb is not None and mb > worker.memory_mb * (1 + 1e-6)
    ]
    if faults:
        raise PartitionError("the stages do not fit the memory of their workers:\n" + "\n".join(faults))


def explained(error: PartitionError, graph: Graph, profile: Profile, problem: Problem) -> PartitionError:
    """An error of a partitioner; where memory is what is missing, one that says how much and what would do."""
    if not problem.has_memory_limits:
        return error
    from gemini.partition.memory_shortage import shortage_text

    text = shortage_text(graph, profile, problem)
    return PartitionError(text) if text else error
