"""Random problems of some size, and the shapes of graphs that partitioners stumble over."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from gemini.partition.partition_options import Options, Worker
from gemini.partition.partition_problem import ORDER, Edge, Item, Problem, Value
from gemini.schedule.link_costs import Links

HEURISTICS = ("acyclic", "metis", "mpipe", "multilevel", "pipedream")
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0}
SAVED = (1.0, 2.0, 3.0)


def made(times: Sequence[float], edges: Iterable[tuple[int, int]], nparts: int, **options: Any) -> Problem:
    """A problem of times and edges; every producer makes one value of 1 MB each way."""
    pairs = sorted(set(edges))
    place = {source: at for at, source in enumerate(dict.fromkeys(source for source, _ in pairs))}
    return Problem(
        tuple(Item(f"layers.{at}.op", (at,), float(ms), ms / 3, 2 * ms / 3) for at, ms in enumerate(times)),
        tuple(Edge(source, target, place[source]) for source, target in pairs),
        tuple(Value(1.0, 1.0) for _ in place),
        nparts,
        Options(**options),
    )


def chain(count: int) -> list[tuple[int, int]]:
    return [(at, at + 1) for at in range(count - 1)]


def shapes() -> dict[str, Problem]:
    """Graphs of odd shapes."""
    star = [(0, at) for at in range(1, 10)]
    diamond = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6)]
    return {
        "one item": made([3.0], [], 1),
        "an item a part": made([1.0, 2.0, 3.0, 4.0], chain(4), 4),
        "one part": made([1.0] * 6, chain(6), 1),
        "no work at all": made([0.0] * 6, chain(6), 3),
        "work at one end": made([0.0] * 9 + [1.0] * 3, chain(12), 3),
        "one giant": made([1.0] * 5 + [1000.0] + [1.0] * 5, chain(11), 4),
        "no edges": made([1.0, 5.0, 2.0, 4.0, 3.0, 3.0], [], 3),
        "two islands": made([1.0] * 12, [*chain(6), *((6 + a, 6 + b) for a, b in chain(6))], 4),
        "all equal": made([1.0] * 64, chain(64), 8),
        "star": made([1.0] * 10, star, 3),
        "star inward": made([1.0] * 10, [(at, 9) for at in range(9)], 3),
        "diamonds": made([1.0, 2.0, 2.0, 1.0, 2.0, 2.0, 1.0], diamond, 3),
        "long skips": made([1.0] * 20, [*chain(20), *((at, 19 - at) for at in range(9))], 4),
        "complete": made([1.0] * 12, [(a, b) for b in range(12) for a in range(b)], 4),
        "very unequal workers": made([1.0] * 30, chain(30), 3, workers=(Worker(1000.0), Worker(1.0), Worker(0.001))),
        "slow links": made([1.0] * 20, chain(20), 4, links=Links(100.0, 1.0)),
    }


@st.composite
def graphs(draw: st.DrawFn, *, limited: bool = True, pinned: bool = True, linked: bool = True) -> Problem:
    """A problem of up to 40 items; hypothesis draws what matters, a seeded generator the rest."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    count = draw(st.integers(1, 40))
    nparts = draw(st.integers(1, min(count, 6)))
    near = draw(st.sampled_from((0.0, 0.3, 1.0, 3.0)))
    edges, values = _flow(rng, count, near)
    pins = pinned and draw(st.booleans())
    weights = draw(st.sampled_from(("equal", "some zero", "spread", "giant")))
    items = tuple(_item(rng, at, _time(rng, weights), rng.randrange(nparts) if pins else None) for at in range(count))
    limits = (None, 40.0, 120.0) if limited and draw(st.booleans()) else (None,)
    speeds = draw(st.sampled_from(((1.0,), (1.0, 2.0, 0.5))))
    workers = tuple(Worker(rng.choice(speeds), rng.choice(limits)) for _ in range(nparts))
    links = draw(st.sampled_from((Links(), Links(), Links(0.1, 1 << 20)))) if linked else Links()
    options = Options(
        workers=workers,
        links=links,
        mixed=draw(st.sampled_from((None, False))),
        micro_batches=draw(st.sampled_from((1, 8))),
        seed=rng.randrange(9),
    )
    return Problem(items, edges, values, nparts, options, WEIGHTS, frozenset("abc"), SAVED)


def _flow(rng: random.Random, count: int, near: float) -> tuple[tuple[Edge, ...], tuple[Value, ...]]:
    edges: list[Edge] = []
    values: list[Value] = []
    for source in range(count):
        readers = [at for at in range(source + 1, count) if rng.random() < near / (at - source)]
        flowing = [at for at in readers if rng.random() < 0.9]
        edges += [Edge(source, at, len(values)) for at in flowing]
        edges += [Edge(source, at, ORDER) for at in readers if at not in flowing]
        if flowing:
            values.append(Value(rng.choice((0.0, 1.0, 5.0)), rng.choice((0.0, 1.0, 5.0))))
    return tuple(edges), tuple(values)


def _time(rng: random.Random, weights: str) -> float:
    if weights == "equal":
        return 1.0
    if weights == "some zero":
        return rng.choice((0.0, 0.0, 1.0, 2.0))
    return rng.random() ** 3 * 10 if weights == "spread" or rng.random() < 0.95 else 300.0


def _item(rng: random.Random, at: int, ms: float, pin: int | None) -> Item:
    return Item(
        name=f"layers.{at // 4}.op{at}",
        nodes=(at,),
        ms=ms,
        forward_ms=ms / 3,
        backward_ms=2 * ms / 3,
        parameters=tuple(rng.sample("abcd", rng.randint(0, 2))),
        saved_own_mb=rng.random() * 3,
        saved_values=tuple(sorted(rng.sample(range(3), rng.randint(0, 2)))),
        peak_mb=rng.random() * 4,
        pin=pin if rng.random() < 0.1 else None,
    )
