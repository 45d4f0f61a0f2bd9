"""Mixed pipes: coarsening, clusters, packing, and the gain of several stages per worker."""

from __future__ import annotations

from hypothesis import given, settings

from gemini.partition import Worker
from gemini.partition.exact.contiguous import find_fastest
from gemini.partition.exact.device_order import slot_orders
from gemini.partition.exact.prefix_costs import SegmentCosts
from gemini.partition.local_search.portfolio import equal_layer_candidates
from gemini.partition.mpipe.coarsen import coarsen
from gemini.partition.mpipe.lpt import assign_pieces
from gemini.partition.mpipe.mpipe_partitioner import partition_mpipe
from gemini.partition.mpipe.seeds import cut_pieces
from gemini.partition.partition_problem import Problem
from tests.partition.random_graphs import chain, graphs, made
from tests.partition.shapes import problem_of

QUICK = settings(max_examples=30, deadline=None)


@QUICK
@given(problem=graphs(pinned=False))
def test_coarsening_keeps_work_and_order(problem: Problem) -> None:
    fine = problem
    for level in coarsen(problem, 8):
        coarse = level.problem
        assert len(level.cluster_of) == len(fine.items)
        assert abs(sum(item.ms for item in coarse.items) - sum(item.ms for item in problem.items)) < 1e-6
        assert all(edge.source < edge.target for edge in coarse.edges)
        assert len(coarse.items) < len(fine.items)
        fine = coarse


@QUICK
@given(problem=graphs())
def test_pieces_are_consecutive_and_never_mix_pins(problem: Problem) -> None:
    piece_of = cut_pieces(problem, 2 * problem.nparts)
    assert piece_of == sorted(piece_of)
    for piece in set(piece_of):
        pins = {item.pin for item, own in zip(problem.items, piece_of, strict=True) if own == piece} - {None}
        assert len(pins) <= 1


def test_the_longest_piece_is_packed_first() -> None:
    """Longest first: 6 | 5 then 4 to the second, 3 to the first; shortest first would end at 10 against 8."""
    problem = made([3.0, 4.0, 5.0, 6.0], [], 2)
    worker_of = assign_pieces(problem, [0, 1, 2, 3])
    assert worker_of[3] != worker_of[2]
    assert worker_of[3] == worker_of[0]
    assert problem.loads(worker_of) == [9.0, 9.0]


def test_faster_workers_are_packed_fuller() -> None:
    problem = made([1.0] * 12, [], 2, workers=(Worker(1.0), Worker(2.0)))
    worker_of = assign_pieces(problem, list(range(12)))
    assert worker_of.count(1) == 8


def test_several_stages_a_worker_balance_what_contiguous_ones_cannot() -> None:
    """Pieces of 4 2 4 2 4 2: two workers in a row are 10 and 8, several stages a worker 9 and 9."""
    problem = made([4.0, 2.0, 4.0, 2.0, 4.0, 2.0, 3.0, 3.0], chain(8), 2, slack=0.0)
    line = SegmentCosts(problem, tuple(range(8)))
    straight = find_fastest(line, slot_orders(problem)[0])
    found = partition_mpipe(problem)
    part_of = [found.worker_of[stage] for stage in found.stage_of]
    assert straight is not None
    assert max(problem.times(part_of)) == 12.0 <= straight.ms


def test_a_stage_more_must_be_worth_it() -> None:
    """Where contiguous cuts balance, nothing is gained by more stages."""
    found = partition_mpipe(made([1.0] * 64, chain(64), 4))
    assert len(set(found.stage_of)) == 4


def test_uneven_models_gain() -> None:
    problem = problem_of("u", 8)
    found = partition_mpipe(problem)
    assert problem.bottleneck([found.worker_of[stage] for stage in found.stage_of]) < 1.05
    assert found.facts["stage_counts"]


def test_equal_layers_come_from_names() -> None:
    problem = problem_of("stack", 4)
    (found,) = equal_layer_candidates(problem)
    layers = {
        item.name.split(".")[1]: found.stage_of[at] for at, item in enumerate(problem.items) if "layers." in item.name
    }
    assert [layers[str(at)] for at in range(12)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
