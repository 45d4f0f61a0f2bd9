"""The composer reaches its bounds: periods, makespans and memory of the named placements."""

from __future__ import annotations

from fractions import Fraction
from math import inf

import pytest

from gemini.errors import InfeasibleError, PlacementError, ScheduleError
from gemini.schedule import Block, Composer, Links, SchedPlan
from gemini.schedule.library import LIBRARY, library
from gemini.schedule.placements import placement
from gemini.schedule.plan_files import to_dict
from gemini.schedule.simulate import simulate

# memory, and the shortest makespans known for 16, 32 and 64 micro-batches on four devices
REFERENCE = {
    "vshape": (4, (76, 140, 268)),
    "xshape": (4, (137, 265, 521)),
    "mshape": (6, (108, 204, 396)),
    "kshape": (6, (100, 196, 388)),
    "nnshape": (6, (140, 268, 524)),
    "nnshape_eager": (6, (140, 268, 524)),
    "mllm": (6, (140, 268, 524)),
    "finetune": (6, (73, 137, 265)),
    "alphafold": (6, (76, 140, 268)),
}
NARROW = ("vshape", "kshape", "xshape")


@pytest.mark.parametrize("name", REFERENCE)
def test_four_devices_reach_the_bound_and_the_shortest_known_makespans(name: str) -> None:
    memory, known = REFERENCE[name]
    plan = Composer.compose(placement(name, 4), memory)
    assert plan.proof is not None
    assert plan.proof.optimal
    assert plan.proof.period == plan.proof.lower_bound
    for nmicros, span in zip((16, 32, 64), known):
        unrolled = plan.unroll(nmicros).validate()
        assert unrolled.nsteps <= span


@pytest.mark.parametrize("ndevs", [8, 16])
@pytest.mark.parametrize("name", REFERENCE)
def test_more_devices_reach_the_bound(name: str, ndevs: int) -> None:
    plan = Composer.compose(placement(name, ndevs), ndevs if name in NARROW else 1.5 * ndevs).validate()
    assert plan.proof is not None
    assert plan.proof.optimal


@pytest.mark.slow
@pytest.mark.parametrize("ndevs", [32, 64, 128])
@pytest.mark.parametrize("name", REFERENCE)
def test_many_devices_reach_the_bound(name: str, ndevs: int) -> None:
    memory = ndevs if name in NARROW else 1.5 * ndevs
    plan = Composer.compose(placement(name, ndevs), memory, time_limit=60)
    assert plan.proof is not None
    assert plan.proof.optimal
    assert all(plan.peak_memory(dev) <= memory for dev in range(ndevs))


@pytest.mark.parametrize(
    ("name", "memory", "period"),
    [
        ("vshape", 1, 16),
        ("vshape", 2, 8),
        ("vshape", 3, Fraction(16, 3)),
        ("vshape", 4, 4),
        ("mshape", 1, 18),
        ("mshape", 2, 10),
        ("mshape", 5, 6),
        ("nnshape", 1, 20),
        ("nnshape", 2, 12),
        ("nnshape", 6, 8),
        ("kshape", 3, 6),
    ],
)
def test_memory_sweep_where_the_bound_is_reached(name: str, memory: int, period: Fraction) -> None:
    plan = Composer.compose(placement(name, 4), memory).validate()
    assert plan.proof is not None
    assert plan.proof.period == pytest.approx(float(period))
    assert plan.proof.optimal


def test_memory_for_three_takes_a_kernel_of_three() -> None:
    pattern = Composer.compose(placement("vshape", 4), 3).pattern
    assert pattern is not None
    assert (pattern.length, pattern.nmicros) == (16, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "memory", "period"),
    [("mshape", 3, 10), ("mshape", 4, 7), ("nnshape", 3, 12), ("nnshape", 4, 9), ("nnshape", 5, 9), ("kshape", 2, 8)],
)
def test_memory_sweep_where_the_bound_is_not_known_to_be_reached(name: str, memory: int, period: int) -> None:
    plan = Composer.compose(placement(name, 4), memory, time_limit=60).validate()
    assert plan.proof is not None
    assert plan.proof.lower_bound <= plan.proof.period <= period


@pytest.mark.parametrize(("ndevs", "share"), [(4, 0.5), (8, 0.4375), (16, 0.375)])
def test_split_backward_on_v_chunks_needs_little_memory_at_the_bound(ndevs: int, share: float) -> None:
    shape = placement("vchunks", ndevs, split=True, input_release=0.5)
    plan = Composer.compose(shape, 2 * ndevs, objective=("period", "memory")).validate()
    assert plan.proof is not None
    assert plan.memory is not None
    assert plan.proof.optimal
    assert max(plan.memory) <= share * 2 * ndevs
    assert all(plan.peak_memory(dev) <= limit for dev, limit in enumerate(plan.memory))


@pytest.mark.parametrize(("ndevs", "nmicros"), [(4, 8), (8, 32), (16, 64)])
def test_split_backward_on_v_chunks_leaves_no_bubble_but_the_first(ndevs: int, nmicros: int) -> None:
    plan = Composer.compose_n(placement("vchunks", ndevs, split=True), 2 * ndevs, nmicros).validate()
    assert plan.nsteps == ndevs - 1 + 6 * nmicros


@pytest.mark.parametrize(("nmicros", "span"), [(8, 27), (12, 39)])
def test_split_backward_with_one_chunk(nmicros: int, span: int) -> None:
    plan = Composer.compose_n(placement("vshape", 4, split=True), 4, nmicros).validate()
    assert plan.nsteps == span
    assert plan.proof is not None
    assert plan.proof.makespan == plan.proof.makespan_bound == span


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize(("ndevs", "nmicros"), [(2, 4), (3, 6), (4, 8)])
@pytest.mark.parametrize("backward", [2, 3])
def test_no_longer_than_a_known_schedule_with_the_same_memory(
    name: str, ndevs: int, nmicros: int, backward: int
) -> None:
    if not LIBRARY[name].admits(ndevs, nmicros, 2):
        return
    known = library(name, ndevs, nmicros, backward=backward)
    assert known.placement is not None
    memory = [known.peak_memory(dev) for dev in range(ndevs)]
    plan = Composer.compose(known.placement, memory, nmicros=nmicros, time_limit=0.5).validate()
    assert plan.nsteps <= known.nsteps


def test_inference_reaches_the_bound_and_blocks_hold_memory_only_while_they_run() -> None:
    for name in REFERENCE:
        plan = Composer.compose(placement(name, 4, train=False), 1, nmicros=8).validate()
        assert plan.proof is not None
        assert plan.proof.optimal


def test_latency_objective_never_holds_a_micro_batch_up() -> None:
    shape = placement("mshape", 4, train=False)
    plan = Composer.compose(shape, objective="latency", nmicros=6).validate()
    for mid in range(6):
        blocks = [block for block in plan if block.mid == mid]
        spent = max(plan.step(block) + block.span for block in blocks) - min(plan.step(block) for block in blocks)
        assert spent == 5
    assert simulate(plan).makespan == plan.nsteps


def test_links_lengthen_the_ramps_and_not_the_period() -> None:
    free = Composer.compose(placement("vshape", 4), 8, nmicros=16)
    slow = Composer.compose(placement("vshape", 4), 8, nmicros=16, links=Links(latency=0.5)).validate()
    assert free.proof is not None
    assert slow.proof is not None
    assert slow.proof.period == free.proof.period == 4
    assert free.nsteps < slow.nsteps <= free.nsteps + 6 * 0.5


def test_the_same_seed_gives_the_same_plan() -> None:
    first, second = (Composer.compose(placement("xshape", 4), 4, nmicros=7) for _ in range(2))
    assert to_dict(first)["blocks"] == to_dict(second)["blocks"]


def test_without_the_solver_the_other_methods_work_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real_import = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("ortools"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr("gemini.schedule.search.steady_state.has_cpsat", lambda: False)
    plan = Composer.compose(placement("nnshape", 4), 5, nmicros=4, time_limit=2).validate()
    assert plan.proof is not None
    assert "OR-tools is not installed" in plan.proof.notes
    assert Composer.compose(placement("mshape", 8), 12).proof.optimal  # type: ignore[union-attr]


# ---------------------------------------------------------------------- bad input


def chain(*blocks: tuple[float, float, int], ndevs: int = 2) -> SchedPlan:
    plan = SchedPlan(ndevs)
    plan.add_block_seq(
        [Block(0, span, memory, "forward" if memory >= 0 else "backward") for span, memory, _ in blocks],
        [[dev] for *_, dev in blocks],
    )
    return plan


def test_a_block_larger_than_the_memory_is_named() -> None:
    with pytest.raises(InfeasibleError, match=r"0F0 takes 5 on device 0, which has 4\n.*least that works is 5"):
        Composer.compose(chain((1, 5, 0), (1, -5, 0)), 4)


def test_too_little_memory_for_one_micro_batch_says_how_much_is_enough() -> None:
    two_at_once = chain((1, 2, 0), (1, 1, 0), (1, -1, 0), (1, -2, 0))
    with pytest.raises(InfeasibleError, match=r"device 0 has memory 2(.|\n)*the least that works is 3 on device 0"):
        Composer.compose(two_at_once, 2)
    assert Composer.compose(two_at_once, 3).validate()


def test_the_least_memory_is_over_all_orders() -> None:
    """Two independent pairs on one device: one after the other needs 2, not 4."""
    plan = SchedPlan(1)
    for _ in range(2):
        take, give = Block(0, 1, 2, "forward"), Block(0, 1, -2, "backward")
        plan.add_block(take, 0, 0)
        plan.add_block(give, 0, 1)
        Block.make_dependency(take, give)
    assert Composer.compose(plan, 2, nmicros=5).validate()
    with pytest.raises(InfeasibleError, match="2 on device 0"):
        Composer.compose(plan, 1)


def test_memory_that_is_never_given_back_is_refused() -> None:
    leaking = chain((1, 2, 0), (1, 1, 1), (1, -1, 1), (1, -1, 0))
    with pytest.raises(InfeasibleError, match="keeps 1 on device 0"):
        Composer.compose(leaking, 10)
    assert Composer.compose(leaking, None, nmicros=3).validate()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"memory": [1, 1]}, PlacementError, "2 memory limits for 4 devices"),
        ({"memory": -1}, PlacementError, "memory limit -1 on device 0"),
        ({"nmicros": 0}, ScheduleError, "0 micro-batches"),
        ({"objective": "speed"}, ScheduleError, "choose from period"),
        ({"time_limit": 0}, ScheduleError, "seconds above zero"),
        ({"max_kernel": 0}, ScheduleError, "1 or more"),
        ({"links": Links(latency=((0, 1), (1, 0)))}, PlacementError, "2 devices"),
    ],
)
def test_odd_options_are_refused(options: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Composer.compose(placement("vshape", 4), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("limits", [[inf, 4, inf, 2], [1, inf, inf, inf], [inf] * 4])
def test_devices_may_have_no_limit(limits: list[float]) -> None:
    plan = Composer.compose(placement("vshape", 4), limits, nmicros=12).validate(limits)
    assert all(plan.peak_memory(dev) <= limit for dev, limit in enumerate(limits))


def test_empty_and_cyclic_placements_are_refused() -> None:
    with pytest.raises(PlacementError, match="no blocks"):
        Composer.compose(SchedPlan(2), 1)
    circle = SchedPlan(1)
    first, second = Block(0, 1, 0, "f"), Block(0, 1, 0, "b")
    circle.add_block(first, 0, 0)
    circle.add_block(second, 0, 1)
    Block.make_dependency(first, second)
    Block.make_dependency(second, first)
    with pytest.raises(PlacementError, match="cycle"):
        Composer.compose(circle, 1)
