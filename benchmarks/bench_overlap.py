"""Pipelined steps against torch.distributed.pipelining and against the physical ceiling, in one run.

    python benchmarks/bench_overlap.py [--models gpt head t5 unet] [--workers 2 4 8] [--repeats 7] [--json FILE]

Processes have one thread, each on its own core where there are enough; the optimizer step is excluded on all sides;
repeats are interleaved, so that noise affects all contenders alike.

    ceiling     k independent processes, each with a k-th of the micro-batches of the unsplit model
    kept        the same in processes that keep freed memory, as Gemini's workers do (`--kept`): the lower bound where
                page faults are slow
    torch …     all its schedules, on stages of equal layer counts, as its users cut them
    ours auto   a model compiled with schedule="auto", called by its program
    ours …      the same with a schedule selected by name

`computing` is the CPU time of the busiest process of a contender in a step: the amount of work and its balance, also on
a shared machine. `profiled` is the planner's prediction before any step, of the step, of computing and of the bubble;
`expected` the prediction for each measured step from earlier ones (`gemini.runtime.pipelined.measured_schedule`),
median over all; `÷ it` the median of the steps as multiples of these. `--seconds` limits the whole run; contenders that
are clearly not the fastest of their side are then not repeated.

Limits, on an idle machine: gpt on 2 workers no slower than the best of torch's schedules and within 1.10 of the
ceiling; head, t5 and unet at least 1.2 times as fast as torch's best; on 4 and 8 workers no slower than torch's best;
controller time under 3 ms per step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from overlap_models import WORKLOADS
from overlap_ours import AUTO, PLANS, Ours, Took
from overlap_peers import CHAINS, Peers, Task, cpu_seconds, pin
from overlap_progress import PROGRESS

from gemini.errors import GeminiError
from gemini.profiling.measured_device import find_device
from gemini.schedule.schedplan import SchedPlan

_GRACE = 10.0  # seconds past the limit: then the run ends wherever it is
_CLEARLY = 1.25  # times the fastest of its side: not worth repeating when time is short


CURRENT: list[Found] = []  # what is being measured, should the run end before


@dataclass
class Contender:
    """Somebody who takes steps, and how long they took."""

    name: str
    pids: Callable[[], list[int]]
    step: Callable[[], float | Took]
    seconds: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    took: list[Took] = field(default_factory=list)

    @property
    def side(self) -> str:
        """Ours, torch's, or none."""
        return self.name.partition(" ")[0]

    @property
    def best(self) -> float:
        """The shortest step."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    def run(self, counts: bool) -> None:
        """Take a step."""
        pids = self.pids()
        before = [cpu_seconds(pid) for pid in pids]
        found = self.step()
        if not counts:
            return
        self.computing.append(max(cpu_seconds(pid) - start for pid, start in zip(pids, before, strict=True)))
        self.seconds.append(found.seconds if isinstance(found, Took) else found)
        if isinstance(found, Took):
            self.took.append(found)


@dataclass
class Found:
    """One model on so many workers."""

    task: Task
    ours: Ours
    contenders: dict[str, Contender]
    left_out: dict[str, str]

    def best_of(self, side: str) -> Contender | None:
        """The fastest of a side."""
        own = [one for one in self.contenders.values() if one.side == side and one.seconds]
        return min(own, key=lambda one: one.best, default=None)


# ── measuring ──────────────────────────────────────────────────────────────────────────────────────────────────────
def measure(task: Task, pools: list[Peers], ours: Ours, given: argparse.Namespace, until: float) -> Found:
    """Steps of every contender, in turn; until then, or as often as asked for."""
    found = Found(task, ours, {}, {})
    CURRENT[:] = [found]
    peers, *keepers = pools
    for plan in given.plans:
        PROGRESS.tell(f"planning {plan}")
        try:
            ours.plan(plan)
        except GeminiError as error:
            found.left_out[f"ours {plan}"] = _line(error)
    patience = given.patience
    entries: list[tuple[str, Callable[[], list[int]], Callable[[], float | Took]]] = [
        ("single process", lambda: peers.pids, lambda: peers.ask("whole", 10 * patience)),
        ("ceiling", lambda: peers.pids, lambda: peers.ask("share", patience)),
        *(("kept", lambda one=one: one.pids, lambda one=one: one.ask("share", patience)) for one in keepers),
        *((f"ours {plan}", lambda: ours.pids, lambda plan=plan: ours.step(plan)) for plan in ours.kinds),
        *(
            (f"torch {chain}", lambda: peers.pids, lambda chain=chain: peers.ask(chain, patience))
            for chain in given.chains
        ),
    ]
    found.contenders = {name: Contender(name, pids, step) for name, pids, step in entries}
    for number in range(given.repeats + 1):
        begin = time.perf_counter()
        for name in list(found.contenders):
            if name == "single process" and (number != 1 or not given.single):
                continue
            if number > 1 and until < float("inf") and _is_slow(found, name):
                continue
            _turn(found, name, counts=number > 0)
            if number > 1 and time.perf_counter() > until:
                break
        if number and time.perf_counter() + 0.5 * (time.perf_counter() - begin) > until:
            break
    return found


def _turn(found: Found, name: str, counts: bool) -> None:
    PROGRESS.tell(name)
    try:
        found.contenders[name].run(counts)
    except (RuntimeError, GeminiError) as error:  # a peer that hangs is one, too; the others go on in new processes
        found.left_out[name] = _line(error)
        del found.contenders[name]


def _is_slow(found: Found, name: str) -> bool:
    own = found.contenders[name]
    best = found.best_of(own.side)
    return name != f"ours {AUTO}" and best is not None and bool(own.seconds) and own.best > _CLEARLY * best.best


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0][:160]


# ── telling ────────────────────────────────────────────────────────────────────────────────────────────────────────
def report(found: Found) -> dict[str, Any]:
    """Print a table of one model on so many workers; the same as plain data."""
    task, ceiling = found.task, found.contenders["ceiling"]
    found.contenders = {name: one for name, one in sorted(found.contenders.items(), key=_rank) if one.seconds}
    title = f"{task.name}, {task.workers} workers, {task.layers} layers, {task.micro_batches} micro-batches"
    print(f"\n{title}; ready after {found.ours.ready_s:.1f} s")
    heads = (
        "best", "median", "÷ ceiling", "computing", "expected", "÷ it", "profiled", "÷ it", "computing", "bubble",
        "profiled",
    )  # fmt: skip
    print(f"  {'seconds a step':24}" + "".join(f"{head:>10}" for head in heads))
    rows = []
    for one in found.contenders.values():
        row = _row(found, one, ceiling)
        rows.append(row)
        own = [row["best"], row["median"], row["to_ceiling"], row["computing"]]
        text = "".join(f"{value:10.3f}" for value in own)
        if "expected" in row:
            text += f"{row['expected']:10.3f}{row['to_expected']:10.3f}"
            text += f"{row['profiled']:10.3f}{row['median'] / row['profiled']:10.3f}"
            text += f"{row['profiled_computing']:10.3f}{row['bubble']:10.1%}{row['profiled_bubble']:10.1%}"
        print(f"  {one.name:24}{text}")
    for name, reason in found.left_out.items():
        print(f"  {name:24} left out: {reason}")
    print(f"  auto: {found.ours.of(AUTO)}")
    told = {**_facts(found), "rows": rows, "left_out": found.left_out, "plan": str(found.ours.of(AUTO))}
    print("  " + "; ".join(f"{name} {value:.3f}" for name, value in told["ratios"].items()))
    print(
        f"  before the first action and after the last: {told['controller_ms']:.2f} ms a step; the controller computed "
        f"{told['controller_computing_ms']:.2f} ms"
    )
    sys.stdout.flush()
    return told


def _rank(entry: tuple[str, Contender]) -> int:
    """Bounds first, then torch, then ours."""
    return {"torch": 1, "ours": 2}.get(entry[1].side, 0)


def _row(found: Found, one: Contender, ceiling: Contender) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": one.name, "best": one.best, "median": one.median, "to_ceiling": one.median / ceiling.median,
        "computing": min(one.computing), "seconds": one.seconds, "computed": one.computing,
    }  # fmt: skip
    if one.took:
        analysis = found.ours.of(one.name.partition(" ")[2]).analysis
        row |= {
            "expected": statistics.median(took.trace.predicted_ms for took in one.took) / 1e3,
            "to_expected": statistics.median(took.trace.step_ms / took.trace.predicted_ms for took in one.took),
            "profiled": analysis.step_ms / 1e3, "profiled_bubble": analysis.bubble,
            "profiled_computing": max(worker.load_ms for worker in analysis.workers) / 1e3,
            "bubble": statistics.median(took.trace.bubble for took in one.took),
            "actions": _actions(one.took, found.ours.of(one.name.partition(" ")[2]).schedule),
        }  # fmt: skip
    return row


def _actions(steps: list[Took], plan: SchedPlan) -> list[tuple[int, str, float, float]]:
    """Of every stage, what its forward and its gradients take by the profile, and took in the middle (ms)."""
    expected = {(block.stage or 0, block.btype): float(block.span) for block in plan}
    found: dict[tuple[int, str], list[float]] = {key: [] for key in expected}
    for took in steps:
        for block in took.trace.measured:
            found[block.stage or 0, block.btype].append(float(block.span))
    return [(*key, expected[key], statistics.median(spans)) for key, spans in sorted(found.items())]


def _facts(found: Found) -> dict[str, Any]:
    task, auto, ceiling = found.task, found.contenders[f"ours {AUTO}"], found.contenders["ceiling"]
    ratios = {"auto ÷ ceiling": auto.median / ceiling.median, "best ÷ best": auto.best / ceiling.best}
    peer = found.best_of("torch")
    if peer is not None:
        ratios |= {
            f"{peer.name} ÷ auto": peer.median / auto.median, "best ÷ best of these": peer.best / auto.best,
            "computing ÷ computing": min(peer.computing) / min(auto.computing),
        }  # fmt: skip
    return {
        "model": task.name, "workers": task.workers, "layers": task.layers, "micro_batches": task.micro_batches,
        "ratios": ratios, "contention": str(found.ours.contention),
        "controller_ms": 1e3 * statistics.median(took.outside for took in auto.took),
        "controller_computing_ms": 1e3 * statistics.median(took.computed for took in auto.took),
    }  # fmt: skip


# ── the run ────────────────────────────────────────────────────────────────────────────────────────────────────────
def cores_for(workers: int) -> list[int]:
    """A core for each worker, one thread of every core first; all there are where they are too few."""
    own = sorted(os.sched_getaffinity(0))

    def place(core: int) -> tuple[int, int]:
        try:
            twins = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        except OSError:
            return 0, core
        return _numbers(twins).index(core), core

    return sorted(own, key=place)[:workers]


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def run_all(given: argparse.Namespace, folder: Path, told: list[dict[str, Any]]) -> None:
    """All models on all numbers of workers; `told` grows."""
    ends = time.perf_counter() + given.seconds
    everywhere = sorted(os.sched_getaffinity(0))
    left = len(given.workers) * len(given.models)
    for workers in given.workers:
        cores = cores_for(workers)
        seats = [[core] for core in cores] if given.pin and len(cores) == workers else [everywhere] * workers
        PROGRESS.tell(f"starting {workers} peers on cores {seats}")
        pools = [Peers(seats), *([Peers(seats, keeping=True)] if given.kept else [])]
        for name in given.models:
            until = time.perf_counter() + (ends - time.perf_counter()) / left
            pieces = given.micro_batches or max(8, 2 * workers)
            task = Task(name, workers, given.layers or max(8, 2 * workers), pieces)
            PROGRESS.tell(f"compiling {name} for {workers} workers")
            for peers in pools:
                peers.take(task)
            pin(os.getpid(), cores)  # workers have as many threads as there are cores for each
            ours = Ours(task, seats, folder)
            pin(os.getpid(), everywhere)
            found = measure(task, pools, ours, given, until)
            CURRENT.clear()
            told.append(report(found))
            for plan in given.trace_plans if given.trace else ():
                if f"ours {plan}" in found.contenders:
                    print("  trace:", *ours.save(plan, Path(given.trace) / f"{name}-{workers}-{plan}"))
            ours.end()
            told[-1]["memory"] = [_memory(task, plan) for plan in (AUTO, *given.plans) if given.memory]
            left -= 1
        for peers in pools:
            peers.end()


def _memory(task: Task, plan: str) -> dict[str, Any]:
    """The memory of the largest worker by a plan, in workers of its own: a peak is of all that a process ever did."""
    from overlap_memory import peaks

    PROGRESS.tell(f"memory of {task.name} by {plan}")
    try:
        found = peaks(task, plan)
    except (RuntimeError, GeminiError) as error:
        return {"name": f"ours {plan}", "reason": _line(error)}
    measured, expected = max(found)
    print(
        f"  {f'ours {plan}':24} largest worker {measured:.0f} MB, {expected:.0f} expected ({measured / expected:.2f})"
    )
    return {"name": f"ours {plan}", "measured_mb": measured, "expected_mb": expected}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--workers", nargs="+", type=int, default=[2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--micro-batches", type=int, help="2 for each worker, at least 8, unless given")
    parser.add_argument("--layers", type=int, help="2 for each worker, at least 8, unless given")
    parser.add_argument("--plans", nargs="*", default=list(PLANS), help="schedules of ours beside auto")
    parser.add_argument("--chains", nargs="*", default=list(CHAINS), choices=list(CHAINS), help="schedules of torch")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the whole run takes no longer")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for a step of a peer")
    parser.add_argument("--json", metavar="FILE", help="where to write all figures")
    parser.add_argument("--trace", metavar="FOLDER", help="where to write timelines and pictures of a step")
    parser.add_argument("--trace-plans", nargs="+", default=[AUTO, "1f1b"])
    parser.add_argument("--memory", action="store_true", help="measure the peak of workers, too, plan by plan")
    parser.add_argument("--kept", action="store_true", help="a ceiling in processes that keep freed memory, too")
    parser.add_argument("--single", action=argparse.BooleanOptionalAction, default=True, help="one process, too")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True, help="processes to cores")
    given = parser.parse_args()
    torch.set_num_threads(1)
    told: list[dict[str, Any]] = []

    def write() -> None:
        if not given.json:
            return
        machine = {
            "torch": torch.__version__, "python": platform.python_version(), "cores": len(os.sched_getaffinity(0)),
            "processor": find_device("cpu").describe(), "load": os.getloadavg(),
        }  # fmt: skip
        Path(given.json).write_text(json.dumps({"machine": machine, "runs": told}, indent=1, default=str))

    def end() -> None:
        for found in CURRENT:
            with contextlib.suppress(Exception):  # contenders that had no turn
                told.append(report(found))
        write()

    if given.seconds < float("inf"):
        PROGRESS.end_after(given.seconds + _GRACE, end)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # times of another day are not those of this run
        run_all(given, Path(folder), told)
    write()


if __name__ == "__main__":
    main()
