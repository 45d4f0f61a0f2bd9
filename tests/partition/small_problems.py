"""Random small problems, and the answers that trying everything gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from hypothesis import strategies as st

from gemini.partition.partition_options import Options, Worker
from gemini.partition.partition_problem import ORDER, Edge, Item, Problem, Value, in_flight
from gemini.schedule.link_costs import Links

NAMES = ("a", "b", "c")
SAVED = (1.0, 2.0, 4.0)


@st.composite
def problems(
    draw: Callable[..., int],
    *,
    most: int = 7,
    parts: int = 3,
    limited: bool = True,
    pinned: bool = True,
    linked: bool = True,
    **options: float,
) -> Problem:
    """A problem of a few items, with whatever a problem may have."""
    nparts = draw(st.integers(1, parts))
    count = draw(st.integers(nparts, most))
    items = tuple(_item(draw, at, nparts if pinned else 0) for at in range(count))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=12)) if pairs else []
    edges, values = _edges(draw, sorted(chosen))
    workers = tuple(
        Worker(
            draw(st.sampled_from((1.0, 1.0, 2.0, 0.5))), draw(st.sampled_from((None, 30.0, 60.0))) if limited else None
        )
        for _ in range(nparts)
    )
    links = draw(st.sampled_from((Links(), Links(0.25), Links(0, 4 << 20), Links(0.1, 1 << 20)))) if linked else Links()
    made = Options(
        workers=workers,
        links=links,
        micro_batches=draw(st.sampled_from((1, 2, 8))),
        slack=options.pop("slack", draw(st.sampled_from((0.0, 0.02, 0.3)))),
        **options,
    )
    sizes = {name: float(2**at) for at, name in enumerate(NAMES)}
    return Problem(items, edges, values, nparts, made, sizes, frozenset(NAMES[:2]), SAVED)


def _item(draw: Callable[..., int], at: int, nparts: int) -> Item:
    ms = float(draw(st.sampled_from((0, 1, 2, 3, 5, 8))))
    return Item(
        name=f"item{at}",
        nodes=(at,),
        ms=ms,
        forward_ms=ms / 2,
        backward_ms=ms / 2,
        parameters=tuple(sorted(draw(st.sets(st.sampled_from(NAMES), max_size=2)))),
        saved_own_mb=float(draw(st.integers(0, 4))),
        saved_values=tuple(sorted(draw(st.sets(st.integers(0, 2), max_size=2)))),
        peak_mb=float(draw(st.integers(0, 8))),
        pin=draw(st.sampled_from((None,) * 9 + tuple(range(nparts)))),
    )


def _edges(draw: Callable[..., int], pairs: Sequence[tuple[int, int]]) -> tuple[tuple[Edge, ...], tuple[Value, ...]]:
    """Edges of one value a producer; some only keep an order."""
    values: list[Value] = []
    made: dict[int, int] = {}
    edges = []
    for source, target in pairs:
        if draw(st.integers(0, 4)) == 0:
            edges.append(Edge(source, target, ORDER))
            continue
        if source not in made:
            made[source] = len(values)
            values.append(Value(float(draw(st.integers(1, 9))), float(draw(st.integers(0, 3)))))
        edges.append(Edge(source, target, made[source]))
    return tuple(edges), tuple(values)


def fits(problem: Problem, stages: Sequence[Sequence[int]], workers: Sequence[int]) -> bool:
    """Whether one stage a worker keeps to pins and memory."""
    for at, (items, worker) in enumerate(zip(stages, workers, strict=True)):
        if any(problem.items[item].pin not in (None, worker) for item in items):
            return False
        limit = problem.workers[worker].memory_mb
        flying = in_flight(at, len(stages), problem.options.micro_batches)
        if limit is not None and problem.memory_mb(items, flying) > limit * (1 + 1e-9):
            return False
    return True


def judged(problem: Problem, stages: Sequence[Sequence[int]], workers: Sequence[int]) -> tuple[float, float]:
    """Bottleneck (ms) and MB across."""
    part_of = [0] * len(problem.items)
    for items, worker in zip(stages, workers, strict=True):
        for item in items:
            part_of[item] = worker
    return max(problem.times(part_of)), problem.cut_mb(part_of)


def contiguous(problem: Problem, orders: Sequence[Sequence[int]]) -> Iterator[tuple[float, float]]:
    """Bottleneck and MB of every contiguous cut that fits."""
    for order, workers in itertools.product(orders, itertools.permutations(range(problem.nparts))):
        for inner in itertools.combinations(range(1, len(order)), problem.nparts - 1):
            cuts = (0, *inner, len(order))
            stages = [order[a:b] for a, b in itertools.pairwise(cuts)]
            if fits(problem, stages, workers):
                yield judged(problem, stages, workers)


def convex(problem: Problem) -> Iterator[tuple[float, float]]:
    """Bottleneck and MB of every partition, one stage a worker, in which values flow forward."""
    for stage_of in itertools.product(range(problem.nparts), repeat=len(problem.items)):
        if len(set(stage_of)) < problem.nparts or any(stage_of[e.source] > stage_of[e.target] for e in problem.edges):
            continue
        stages = [[i for i, stage in enumerate(stage_of) if stage == at] for at in range(problem.nparts)]
        for workers in itertools.permutations(range(problem.nparts)):
            if fits(problem, stages, workers):
                yield judged(problem, stages, workers)


def looped(problem: Problem, orders: Sequence[Sequence[int]], chunks: int) -> Iterator[tuple[float, float]]:
    """Bottleneck and MB of all cuts with several chunks a worker."""
    workers = list(range(problem.nparts)) * chunks
    for order in orders:
        for inner in itertools.combinations(range(1, len(order)), len(workers) - 1):
            stages = [order[a:b] for a, b in itertools.pairwise((0, *inner, len(order)))]
            if fits_looped(problem, stages, workers):
                yield judged(problem, stages, workers)


def fits_looped(problem: Problem, stages: Sequence[Sequence[int]], workers: Sequence[int]) -> bool:
    """Whether several stages a worker keep to pins and memory."""
    pinned = (problem.items[i].pin in (None, w) for s, w in zip(stages, workers, strict=True) for i in s)
    used = problem.worker_memory_mb(stages, workers)
    limits = [worker.memory_mb for worker in problem.workers]
    return all(pinned) and all(
        limit is None or mb <= limit * (1 + 1e-9) for mb, limit in zip(used, limits, strict=True)
    )
