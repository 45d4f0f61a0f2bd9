"""One stage per worker, cut from topological orders and improved by moves."""

from __future__ import annotations

import random

import pytest

from gemini.errors import PartitionError
from gemini.partition.acyclic import acyclic_candidates, partition_acyclic
from gemini.partition.exact.exact_partitioner import search
from tests.partition.random_graphs import chain, made
from tests.partition.shapes import problem_of


def test_all_kinds_of_moves_are_tried() -> None:
    found = acyclic_candidates(problem_of("translator", 4), random.Random(0))
    for moves in ("simple", "advanced", "global"):
        assert any(answer.origin.endswith(f"{moves} moves") for answer in found)


@pytest.mark.parametrize("model", ["stack", "translator", "u"])
def test_moves_never_lose_what_contiguous_cuts_have(model: str) -> None:
    problem = problem_of(model, 4)
    best = min(answer.time_ms for answer in acyclic_candidates(problem, random.Random(0)))
    found = partition_acyclic(problem)
    part_of = [found.worker_of[stage] for stage in found.stage_of]
    assert max(problem.times(part_of)) <= best * (1 + problem.options.slack) * (1 + 1e-9)


def test_branches_are_balanced_across() -> None:
    """Two branches of which neither can be halved: contiguous cuts of any order are worse than what moves find."""
    times = [3.0, 3.0, 3.0, 1.0, 1.0, 1.0]
    problem = made(times, [], 3, slack=0.0)
    found = partition_acyclic(problem)
    assert max(problem.loads([found.worker_of[stage] for stage in found.stage_of])) == 4.0


def test_is_as_good_as_exact_on_chains() -> None:
    rng = random.Random(3)
    problem = made([rng.random() for _ in range(60)], chain(60), 5, slack=0.0)
    mine, best = partition_acyclic(problem), search(problem)
    assert max(problem.loads([mine.worker_of[s] for s in mine.stage_of])) == pytest.approx(
        max(problem.loads([best.worker_of[s] for s in best.stage_of]))
    )


def test_several_stages_a_worker_are_refused() -> None:
    with pytest.raises(PartitionError, match="one stage per worker"):
        partition_acyclic(made([1.0] * 4, chain(4), 2, mixed=True))


def test_pins_in_a_circle_are_named() -> None:
    from dataclasses import replace

    problem = made([1.0] * 4, chain(4), 2)
    items = [replace(item, pin=pin) for item, pin in zip(problem.items, (0, 1, 0, None), strict=True)]
    with pytest.raises(PartitionError, match=r"parts \[0, 1\] to precede each other"):
        partition_acyclic(replace(problem, items=tuple(items)))
