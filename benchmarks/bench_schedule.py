"""Quality and search time of composed schedules, against bounds and the best known figures.

    python benchmarks/bench_schedule.py               everything (a few minutes)
    python benchmarks/bench_schedule.py --quick       four to sixteen devices, fewer random instances

Seconds are processor time of one core, medians over five seeds where a table says so. Every quality is a ratio to a
lower bound, or to a peer scheduled in the same run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

from gemini.schedule import Block, Composer, Links, SchedPlan
from gemini.schedule.library import library_on
from gemini.schedule.placements import placement

SEEDS = range(5)
NAMES = ("vshape", "xshape", "mshape", "kshape", "nnshape", "nnshape_eager", "mllm", "finetune", "alphafold")
# Memory, and the shortest makespans known for 16/32/64 micro-batches on four devices (an earlier composer on z3 in
# 1 s to over 150 s; a plain CP-SAT modulo model).
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
# Periods known for kernels of one micro-batch on four devices.
SWEEP = {
    "vshape": {1: 16, 2: 8, 3: 8, 4: 4},
    "mshape": {1: 18, 2: 10, 3: 10, 4: 7, 5: 6},
    "nnshape": {1: 20, 2: 12, 3: 12, 4: 9, 5: 9, 6: 8},
    "kshape": {2: 8, 3: 6},
}


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(heads), *texts]) for column in range(len(heads))]
    print(f"\n{title}")
    for row in [list(heads), ["─" * width for width in widths], *texts]:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)))


def timed(make: Callable[[int], SchedPlan]) -> tuple[SchedPlan, float]:
    """The plan of the first seed, and the median seconds over all seeds."""
    plans, seconds = [], []
    for seed in SEEDS:
        began = time.process_time()
        plans.append(make(seed))
        seconds.append(time.process_time() - began)
    return plans[0], statistics.median(seconds)


def ratio(value: float, base: float) -> str:
    return f"{value / base:.4f}"


def four_devices() -> None:
    rows = []
    for name, (memory, known) in REFERENCE.items():
        shape = placement(name, 4)
        plan, seconds = timed(lambda seed: Composer.compose(shape, memory, seed=seed))  # noqa: B023
        assert plan.proof is not None
        spans = [plan.unroll(nmicros).validate().nsteps for nmicros in (16, 32, 64)]
        rows.append(
            (
                name,
                memory,
                f"{plan.proof.period:g}",
                ratio(plan.proof.period, plan.proof.lower_bound),
                "/".join(map(str, spans)),
                "/".join(map(str, known)),
                max(ratio(span, best) for span, best in zip(spans, known)),
                f"{seconds:.3f}",
            )
        )
    heads = (
        "placement",
        "memory",
        "period",
        "÷ bound",
        "makespan 16/32/64",
        "best known",
        "÷ best known",
        "s (median)",
    )
    table("Four devices", heads, rows)


def more_devices(counts: Sequence[int]) -> None:
    rows = []
    for name in NAMES:
        cells: list[object] = [name]
        for ndevs in counts:
            shape = placement(name, ndevs)
            memory = ndevs if name in ("vshape", "kshape", "xshape") else 1.5 * ndevs
            began = time.process_time()
            plan = Composer.compose(shape, memory, time_limit=60)
            seconds = time.process_time() - began
            assert plan.proof is not None
            cells.append(f"{ratio(plan.proof.period, plan.proof.lower_bound)} in {seconds:.2f} s")
        rows.append(cells)
    table("Period ÷ bound; memory P (v, x, k) or 1.5 P", ("placement", *(f"{n} devices" for n in counts)), rows)


def memory_sweep() -> None:
    rows = []
    for name, periods in SWEEP.items():
        for memory, known in periods.items():
            began = time.process_time()
            plan = Composer.compose(placement(name, 4), memory, time_limit=60).validate()
            seconds = time.process_time() - began
            assert plan.proof is not None
            assert plan.pattern is not None
            rows.append(
                (
                    name,
                    memory,
                    f"{plan.proof.period:.4g}",
                    plan.pattern.nmicros,
                    ratio(plan.proof.period, plan.proof.lower_bound),
                    known,
                    ratio(plan.proof.period, known),
                    f"{seconds:.2f}",
                )
            )
    heads = ("placement", "memory", "period", "kernel", "÷ bound", "one-kernel best", "÷ that", "s")
    table("Memory sweep, four devices", heads, rows)


def split_backward() -> None:
    rows = []
    for name in ("vchunks", "interleaved"):
        for ndevs in (4, 8, 16):
            shape = placement(name, ndevs, split=True, input_release=0.5)
            began = time.process_time()
            plan = Composer.compose(shape, 2 * ndevs, objective=("period", "memory"))
            assert plan.proof is not None
            assert plan.memory is not None
            share = max(plan.memory) / (2 * ndevs)
            seconds = time.process_time() - began
            rows.append((name, ndevs, ratio(plan.proof.period, plan.proof.lower_bound), share, f"{seconds:.2f}"))
    table(
        "Split backward: least memory at the bound, as a share of 1F1B's (V: .50/.4375/.375 known)",
        ("placement", "devices", "period ÷ bound", "memory ÷ 1F1B", "s"),
        rows,
    )
    rows = []
    for name, ndevs, nmicros in (
        ("vshape", 4, 8),
        ("vshape", 4, 12),
        ("vchunks", 4, 8),
        ("vchunks", 8, 32),
        ("vchunks", 16, 64),
    ):
        chunks = 1 if name == "vshape" else 2
        shape = placement(name, ndevs, split=True)
        plan, seconds = timed(lambda seed: Composer.compose(shape, chunks * ndevs, nmicros=nmicros, seed=seed))  # noqa: B023
        assert plan.proof is not None
        bound = ndevs - 1 + 3 * chunks * nmicros
        rows.append((name, ndevs, nmicros, plan.validate().nsteps, ratio(plan.nsteps, bound), f"{seconds:.3f}"))
    table(
        "Split backward: makespan at 1F1B's memory; bound = P − 1 + work",
        ("placement", "devices", "micro-batches", "makespan", "÷ bound", "s (median)"),
        rows,
    )


def against_interleaved() -> None:
    """The same work (two chunks a device, F 1, B 2 whole or 1 + 1 split) under interleaved 1F1B and composed."""
    rows = []
    for ndevs, nmicros in ((4, 8), (8, 32)):
        whole = placement("interleaved", ndevs, backward=2)
        known = library_on("interleaved_1f1b", whole, nmicros)
        memory = [known.peak_memory(dev) for dev in range(ndevs)]
        same = Composer.compose(whole, memory, nmicros=nmicros)
        split = Composer.compose(placement("vchunks", ndevs, split=True), 2 * ndevs, nmicros=nmicros)
        rows.append(
            (
                ndevs,
                nmicros,
                known.nsteps,
                f"{same.nsteps} ({ratio(same.nsteps, known.nsteps)})",
                f"{split.nsteps} ({ratio(split.nsteps, known.nsteps)})",
            )
        )
    heads = ("devices", "micro-batches", "interleaved 1F1B", "composed, same memory", "V chunks, split, 1F1B memory")
    table("Against interleaved 1F1B: makespan", heads, rows)


def random_instances(counts: Sequence[int], repeats: int) -> None:
    chance = random.Random(0)
    rows = []
    everything = []
    for ndevs in counts:
        gaps, seconds = [], []
        for name in NAMES:
            for repeat in range(repeats):
                shape, links = unequal(placement(name, ndevs), chance, repeat % 2 == 1)
                began = time.process_time()
                plan = Composer.compose(shape, 1.5 * ndevs, links=links, time_limit=20)
                seconds.append(time.process_time() - began)
                assert plan.proof is not None
                gaps.append(plan.proof.gap)
        everything += gaps
        within = sum(gap <= 0.01 for gap in gaps) / len(gaps)
        rows.append(
            (
                ndevs,
                len(gaps),
                f"{within:.1%}",
                f"{max(gaps):.2%}",
                f"{statistics.median(seconds):.3f}",
                f"{max(seconds):.2f}",
            )
        )
    share = sum(gap <= 0.01 for gap in everything) / len(everything)
    heads = ("devices", "instances", "within 1 %", "largest gap", "s (median)", "s (most)")
    table(f"Real spans ±30 %, unequal devices, latency 0 to 0.25: {share:.1%} within 1 % of the bound", heads, rows)


def unequal(shape: SchedPlan, chance: random.Random, devices_too: bool) -> tuple[SchedPlan, Links]:
    speed = [chance.uniform(0.7, 1.3) if devices_too else 1.0 for _ in range(shape.ndevs)]
    plan = SchedPlan(shape.ndevs)
    twins = {}
    for block in shape:
        factor = chance.uniform(0.7, 1.3) * max(speed[dev] for dev in shape.device(block))
        twins[block] = Block(0, block.span * factor, block.memory, block.btype, stage=block.stage)
        plan.add_block(twins[block], shape.device(block), shape.step(block))
    for block, twin in twins.items():
        for prev in block.before:
            Block.make_dependency(twins[prev], twin)
    return plan, Links(latency=chance.choice((0.0, chance.uniform(0, 0.25))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 16 devices, fewer random instances")
    quick = parser.parse_args().quick
    four_devices()
    more_devices((8, 16) if quick else (8, 16, 32, 64, 128))
    memory_sweep()
    split_backward()
    against_interleaved()
    random_instances((4, 8, 16) if quick else (4, 8, 16, 32), 2 if quick else 6)


if __name__ == "__main__":
    main()
