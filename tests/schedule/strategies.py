"""Random placements and plans for property tests.

`placements()` draws the blocks of one micro-batch: a random DAG on a few devices, some blocks on several devices at
once, integer or real spans, memories that come back to zero on every device, and, where asked, links that cost time.
`plans()` draws a valid schedule of such a placement for several micro-batches, made without the composer.
"""

from __future__ import annotations

from hypothesis import strategies as st

from gemini.schedule import Block, Links, SchedPlan
from gemini.schedule.block import Number
from gemini.schedule.schedplan import connect

TYPES = ("forward", "backward", "input_gradient", "weight_gradient", "loss")


def spans(reals: bool) -> st.SearchStrategy[Number]:
    """Block times: small integers, or reals of the same size."""
    whole = st.integers(1, 4)
    return whole if not reals else st.one_of(whole, st.floats(0.25, 4.0, allow_nan=False).map(lambda x: round(x, 6)))


def memories(reals: bool) -> st.SearchStrategy[Number]:
    """What a block takes (its partner gives the same back)."""
    whole = st.integers(0, 3)
    return whole if not reals else st.one_of(whole, st.floats(0.0, 3.0).map(lambda x: round(x, 6)))


@st.composite
def links_between(draw: st.DrawFn, ndevs: int) -> Links:
    """Latency and bandwidth: free, one for all pairs, or a matrix."""
    kind = draw(st.sampled_from(("free", "uniform", "matrix")))
    if kind == "free":
        return Links()
    cost = st.one_of(st.just(0), st.integers(1, 3), st.floats(0.1, 1.0).map(lambda x: round(x, 4)))
    if kind == "uniform":
        return Links(draw(cost), draw(st.sampled_from((0, 1, 8, 100.0))))
    matrix = st.lists(st.lists(cost, min_size=ndevs, max_size=ndevs).map(tuple), min_size=ndevs, max_size=ndevs)
    return Links(draw(matrix.map(tuple)), draw(st.sampled_from((0, 10))))


@st.composite
def placements(
    draw: st.DrawFn,
    *,
    max_devices: int = 4,
    max_blocks: int = 10,
    reals: bool = False,
    several_devices: bool = True,
    links: bool = False,
) -> SchedPlan:
    """The blocks of one micro-batch with feasible times: one after the other as device and dependencies allow."""
    ndevs = draw(st.integers(1, max_devices))
    count = draw(st.integers(1, max_blocks))
    one = st.integers(0, ndevs - 1).map(lambda dev: (dev,))
    some = st.sets(st.integers(0, ndevs - 1), min_size=1).map(lambda devs: tuple(sorted(devs)))
    where = [draw(st.one_of(one, one, one, some) if several_devices else one) for _ in range(count)]
    memory: list[Number] = [0] * count
    edges: dict[tuple[int, int], Number] = {}
    for later in range(1, count):
        for prev in draw(st.sets(st.integers(0, later - 1), max_size=2)):
            edges[prev, later] = draw(st.sampled_from((0, 0, 5, 2.5))) if links else 0
    # A block that takes memory and a later one on the same devices that gives it back, never the other way round.
    for later in range(1, count):
        partners = [prev for prev in range(later) if where[prev] == where[later] and memory[prev] == 0]
        if partners and draw(st.booleans()):
            prev = draw(st.sampled_from(partners))
            amount = draw(memories(reals))
            if amount and memory[later] == 0:
                memory[prev], memory[later] = amount, -amount
                edges.setdefault((prev, later), 0)
    blocks = [
        Block(0, draw(spans(reals)), memory[i], draw(st.sampled_from(TYPES)), stage=i, gid=i) for i in range(count)
    ]
    for (prev, later), nbytes in sorted(edges.items()):
        Block.make_dependency(blocks[prev], blocks[later], nbytes)
    plan = SchedPlan(ndevs)
    plan.links = draw(links_between(ndevs)) if links else Links()
    return place_in_order(plan, blocks, where)


@st.composite
def plans(draw: st.DrawFn, *, max_micros: int = 4, **options: object) -> SchedPlan:
    """A valid schedule: copies of a random placement, taken in a random order that dependencies allow."""
    placement = draw(placements(**options))  # type: ignore[arg-type]
    nmicros = draw(st.integers(1, max_micros))
    originals: dict[Block, Block] = {}
    for mid in range(nmicros):
        twins = {block: block.like(mid) for block in placement}
        connect(twins)
        originals.update({twin: block for block, twin in twins.items()})
    order: list[Block] = []
    waiting = {block: len(block.before) for block in originals}
    while waiting:
        ready = [block for block, missing in waiting.items() if not missing]
        block = ready[draw(st.integers(0, len(ready) - 1))]
        order.append(block)
        del waiting[block]
        for later in block.after:
            waiting[later] -= 1
    plan = SchedPlan(placement.ndevs)
    plan.links, plan.placement = placement.links, placement
    return place_in_order(plan, order, [placement.device(originals[block]) for block in order])


def place_in_order(plan: SchedPlan, blocks: list[Block], where: list[tuple[int, ...]]) -> SchedPlan:
    """Add blocks one by one, each at the first time its devices are free and its inputs there."""
    free: list[Number] = [0] * plan.ndevs
    homes = dict(zip(blocks, where))
    for block, devices in homes.items():
        arrivals = [
            plan.step(prev) + prev.span + plan.links.delay(homes[prev], devices, block.nbytes.get(prev, 0))
            for prev in block.before
        ]
        start = max([*arrivals, *(free[dev] for dev in devices)])
        plan.add_block(block, devices, start)
        for dev in devices:
            free[dev] = start + block.span
    return plan
