"""Partitioner `pipedream`: the best straight pipeline; the best replicated one is reported in its facts.

A partition has one worker per stage, so the result is straight. The best pipeline with replicated stages is found by
the same dynamic program and reported with its predicted time in `facts["replicated"]`.
"""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

from gemini.errors import PartitionError
from gemini.partition.exact.device_order import slot_orders
from gemini.partition.local_search.initial import check_size
from gemini.partition.local_search.score import evaluate, to_assignment
from gemini.partition.partition_problem import Problem
from gemini.partition.pipedream.merged_items import MergedItems, merge_items
from gemini.partition.pipedream.replicated import find_replicated
from gemini.partition.pipedream.straight import find_straight
from gemini.partition.registry import Assignment

_CUTS = 1000  # cut positions of a straight pipeline
_REPLICATED_CUTS = 64
_SLOT_ORDERS = 12


def partition_pipedream(problem: Problem) -> Assignment:
    """Return the best straight pipeline, with `chunks` stages per worker in round-robin order where requested."""
    check_size(problem)
    chunks = problem.options.chunks if problem.options.mixed is not False else 1
    chunks = max(1, min(chunks, len(problem.items) // problem.nparts))
    clusters = merge_items(problem, _CUTS // (2 if chunks > 1 else 1))
    tables = [tuple(slot.worker for slot in slots) * chunks for slots in islice(slot_orders(problem), _SLOT_ORDERS)]
    found = [(made, workers) for workers in tables if (made := find_straight(clusters, workers)) is not None]
    if not found:
        raise PartitionError(
            f"no {problem.nparts * chunks} consecutive stages fit the memory of the workers and the pins\n"
            "    → request more parts, recompute=True, or mpipe, which is not limited to consecutive stages"
        )
    (_, ends), workers = min(found, key=lambda one: one[0][0])
    stage_of = [0] * clusters.size
    for stage, (begin, end) in enumerate(pairwise([0, *ends])):
        stage_of[begin:end] = [stage] * (end - begin)
    candidate = evaluate(problem, [stage_of[cluster] for cluster in clusters.cluster_of], workers)
    return to_assignment(problem, candidate, replicated=_replicated_facts(problem))


def _replicated_facts(problem: Problem) -> dict[str, Any]:
    """Describe the best replicated pipeline: its time, and the first and last item and the workers of each stage."""
    clusters = merge_items(problem, _REPLICATED_CUTS)
    ms, stages = find_replicated(clusters)
    members = _members(clusters)
    return {
        "ms": round(ms, 6),
        "speedup": round(sum(item.ms for item in problem.items) / ms, 3) if ms else 1.0,
        "stages": [
            {
                "items": len(items),
                "first": problem.items[items[0]].name,
                "last": problem.items[items[-1]].name,
                "workers": list(stage.workers),
            }
            for stage in stages
            if (items := [at for cluster in range(stage.begin, stage.end) for at in members[cluster]])
        ],
    }


def _members(clusters: MergedItems) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(clusters.size)]
    for at, cluster in enumerate(clusters.cluster_of):
        found[cluster].append(at)
    return found
