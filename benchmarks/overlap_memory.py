"""The memory of workers in pipelined steps, against the prediction of their plan.

    python benchmarks/overlap_memory.py [--models gpt t5 unet] [--schedules 1f1b zb_v] [--micro-batches 8]

Measured: the peak memory of a worker in some steps (anonymous and shared pages, not code), without that of a worker
whose model is nearly empty: the interpreter, torch and Gemini. Expected: weights, gradients, saved tensors, working
memory of actions, values in transit, and idle memory of the heap and of libraries (`gemini.planner.worker_memory`);
optimizer state is in the controller. Idle memory differs between runs by some MB, as the C library decides it.

Limit: the largest worker at most 1.10 times its expected memory.
"""

from __future__ import annotations

import argparse
import functools
import sys

import torch
from overlap_models import WORKLOADS
from overlap_peers import Task

from gemini import GeminiCompiler, GeminiConfig
from gemini.partition.analysis.analysis_result import MemoryEstimate
from gemini.runtime.interception import dispatch

LIMIT = 1.10
STEPS = 3


def peaks(task: Task, schedule: str) -> list[tuple[float, float]]:
    """(measured MB, expected MB) of each worker, in steps of a model by a schedule; with workers of its own."""
    return [(measured, _expected(memory)) for measured, memory in measure(task, schedule)]


def measure(task: Task, schedule: str) -> list[tuple[float, MemoryEstimate]]:
    """Measured MB of each worker, and what its plan expects."""
    return _measured(*task.made(), task, schedule, _without_model(task.workers))


@functools.lru_cache(maxsize=4)
def _without_model(workers: int) -> float:
    """MB of a worker that has run steps of a very small model."""
    model = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.GELU())))
    task = Task("gpt", workers, 1, 4)
    found = _measured(model, torch.randn(4, 8), torch.randint(0, 8, (4,)), task, "1f1b", 0.0)
    return max(measured for measured, _ in found)


def _measured(  # noqa: PLR0917
    model: torch.nn.Module, batch: torch.Tensor, targets: torch.Tensor, task: Task, schedule: str, before: float
) -> list[tuple[float, MemoryEstimate]]:
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=task.workers, accum_degree=task.micro_batches, schedule=schedule, quiet=True
    )
    GeminiCompiler().compiler(model, config)
    managed = dispatch.find_managed(model)
    if managed is None or managed.pipelined is None:
        raise RuntimeError("the model is not managed")
    try:
        pids = [worker.process.pid for worker in managed.pool.workers]

        def step() -> None:
            model.zero_grad(set_to_none=True)
            task.work.loss(model(batch), targets).backward()

        for _ in range(3):  # watched, planned for, the first by the plan
            step()
        for pid in pids:
            _forget_peak(pid)
        for _ in range(STEPS):
            step()
        ((kind,),) = managed.pipelined.plans.kinds.values()
        if kind.plan is None or not managed.pipelined.steps:
            raise RuntimeError(f"not overlapped: {kind.reason or '; '.join(managed.pipelined.journal.reasons)}")
        return [
            (_peak(pid) - before, worker.memory) for pid, worker in zip(pids, kind.plan.analysis.workers, strict=True)
        ]
    finally:
        managed.pool.stop()


def _expected(memory: MemoryEstimate) -> float:
    return memory.total_mb - memory.optimizer_mb


def _status(pid: int) -> dict[str, float]:
    """MB by name."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        pairs = [line.split(":") for line in file if line.endswith(" kB\n")]
    return {name: int(value.split()[0]) / 1024 for name, value in pairs}


def _forget_peak(pid: int) -> None:
    with open(f"/proc/{pid}/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _peak(pid: int) -> float:
    found = _status(pid)
    return found["VmHWM"] - found["RssFile"]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt", "t5", "unet"], choices=list(WORKLOADS))
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_v"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    missed = 0
    print(f"{'MB of each worker':16} {'schedule':8} {'measured':>8} {'expected':>8} {'ratio':>6}   of which")
    for name in given.models:
        for schedule in given.schedules:
            task = Task(name, given.workers, given.layers, given.micro_batches)
            found = measure(task, schedule)
            largest = max(found, key=lambda one: one[0])
            missed += largest[0] > LIMIT * _expected(largest[1])
            for measured, memory in found:
                parts = (
                    f"weights {memory.weights_mb:.0f}, gradients {memory.gradients_mb:.0f}, "
                    f"kept {memory.activations_mb:.0f}, working {memory.working_mb:.0f}, "
                    f"transfers {memory.transfers_mb:.0f}, libraries and gaps {memory.libraries_mb:.0f}"
                )
                expected = _expected(memory)
                print(
                    f"{name:16} {schedule:8} {measured:8.0f} {expected:8.0f} {measured / expected:6.2f}   {parts}",
                    flush=True,
                )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
