"""Overlapped steps against torch.distributed.pipelining and against the physical ceiling, in one run.

    python benchmarks/bench_overlap.py [--models gpt head t5 unet] [--repeats 7] [--micro-batches 8]

Two workers of one thread each; the optimizer's step is excluded on all sides; repeats are interleaved, so that a noisy
machine is noisy for everybody. The ceiling: two processes, each with half of the micro-batches of the unsplit model.
torch gets stages of equal layer counts, as its users cut them.

`computing` is what the busiest process of a contender computed in a step: how much work there is and how well it
is divided, on a machine that others use as well.

Limits, on a quiet machine: gpt no slower than the best of torch's schedules and within 1.10 of the ceiling; head, t5
and unet at least 1.2 times as fast as torch's best; the controller's own work under 3 ms a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from overlap_models import WORKLOADS
from overlap_peers import CHAINS, Pair, cpu_seconds, half, torch_ranks

from gemini.capture.binding import bind
from gemini.capture.forms import Literal, Mapping, Ref, Sequence
from gemini.capture.regions import Region
from gemini.partition import Options
from gemini.pipe import Piped, pipe_model
from gemini.runtime.controller.crew import Crew
from gemini.runtime.controller.faults import Record
from gemini.runtime.controller.household import Household
from gemini.runtime.executor.executor import Executor
from gemini.runtime.executor.request import StepRequest, StepResult, Whole, inputs_of
from gemini.schedule.library import library
from gemini.step.program import Loss, program_of
from gemini.step.tape import Op

PLANS = {"1f1b": 2, "zb_h1": 2, "interleaved_1f1b": 4, "zb_v": 4}  # and their stages


class Ours:
    """A model in two workers, by several plans."""

    def __init__(self, name: str, micro_batches: int) -> None:
        torch.manual_seed(0)
        self.work = WORKLOADS[name]
        self.count = micro_batches
        self.model = self.work.make()
        self.batch, self.targets = self.work.batch(micro_batches), self.work.targets(micro_batches)
        self.crew = Crew(2, 1)
        self.household = Household(self.crew, Record(name), torch.device("cpu"))
        self.household.take_in([*self.model.parameters(), *self.model.buffers()])
        self.piped: dict[int, Piped] = {}
        self.ready: dict[str, tuple[Executor, StepRequest]] = {}
        self.last: StepResult | None = None

    def plan(self, name: str) -> None:
        """Make a plan ready to run."""
        stages = PLANS[name]
        if stages not in self.piped:
            self.piped[stages] = pipe_model(
                self.model, (self.batch[:1],), nparts=stages, options=Options(mixed=False), rounds=5
            )
        piped = self.piped[stages]
        executor = Executor(self.crew, self.household, program_of(piped, library(name, 2, self.count)))
        texts = {
            str(sys.modules[type(stage).__module__].__file__): code.source
            for stage, code in zip(piped.stages, piped.codes, strict=True)
        }
        executor.install(piped.stages, texts)
        self.ready[name] = executor, self._request(piped)

    def _request(self, piped: Piped) -> StepRequest:
        sizes = (1,) * self.count
        inputs = inputs_of(piped.wiring, self.model, bind(self.model, (self.batch,), {}), {id(self.batch): 0}, sizes)
        (port,) = (port.name for port in piped.wiring.results.values())
        region = Region.current()
        ops, logits = [], 0
        if self.targets.dim() == 2:
            ops.append(Op(torch.Tensor.transpose, _form(Ref(0), Literal(1), Literal(2)), region, (2,)))
            logits = 2
        ops.append(Op(F.cross_entropy, _form(Ref(logits), Ref(1)), region, (3,)))
        loss = Loss(tuple(ops), {0: port}, (1,), 3)
        shares = {len(ops) - 1: [1 / self.count] * self.count}
        return StepRequest(inputs, sizes, region, loss, {1: Whole(self.targets, 0)}, op_shares=shares)

    def step(self, name: str) -> float:
        """Seconds of a step; gradients of the step before are dropped first, as by `zero_grad`."""
        executor, request = self.ready[name]
        self.last = None
        begin = time.perf_counter()
        self.last = executor.run(request)
        return time.perf_counter() - begin

    def overhead(self) -> float:
        """Seconds of the last step in which no worker had begun or all had ended: the controller's own work."""
        if self.last is None:
            return 0.0
        begin = min(event.begin for event in self.last.trace)
        return max(event.end for event in self.last.trace) - begin


def _form(*args: Any) -> Sequence:
    return Sequence(tuple, (Sequence(tuple, args), Mapping(dict, ())))


Times = dict[str, list[tuple[float, float]]]


def measure(name: str, repeats: int, micro_batches: int) -> Times:
    """Seconds of every contender, interleaved, and what the busiest of its processes computed."""
    ours, peers = Ours(name, micro_batches), torch_ranks(name, micro_batches)
    ceiling = Pair(half, name, micro_batches)
    own = [worker.process.pid for worker in ours.crew.workers]
    steps: dict[str, tuple[list[int], Callable[[], float]]] = {
        "single process": (ceiling.pids, lambda: ceiling.ask("whole")),
        "ceiling": (ceiling.pids, lambda: ceiling.ask("half")),
    }
    for chain in CHAINS:
        steps[f"torch {chain}"] = peers.pids, lambda chain=chain: peers.ask(chain)
    for plan in PLANS:
        ours.plan(plan)
        steps[f"ours {plan}"] = own, lambda plan=plan: ours.step(plan)
    found: Times = {key: [] for key in steps}
    controller = []
    for repeat in range(repeats + 2):
        for key, (pids, step) in list(steps.items()):
            before = [cpu_seconds(pid) for pid in pids]
            try:
                seconds = step()
            except RuntimeError as error:
                print(f"  {key}: left out: {error}"[:160])
                del steps[key], found[key]
                continue
            if repeat >= 2:
                computed = max(cpu_seconds(pid) - start for pid, start in zip(pids, before, strict=True))
                found[key].append((seconds, computed))
                if key.startswith("ours"):
                    controller.append(seconds - ours.overhead())
    print(f"  controller's own work: {1e3 * statistics.median(controller):.2f} ms a step")
    ours.crew.stop()
    peers.end()
    ceiling.end()
    return found


def report(name: str, found: Times) -> None:
    """A table of one model."""
    best = {key: min(seconds for seconds, _ in times) for key, times in found.items()}
    peer = min((seconds for key, seconds in best.items() if key.startswith("torch")), default=float("nan"))
    own = min(seconds for key, seconds in best.items() if key.startswith("ours"))
    print(f"{name + ': seconds a step':26} {'best':>8} {'median':>7} {'÷ ceiling':>9} {'computing':>9}")
    for key, times in found.items():
        middle, busiest = statistics.median(one for one, _ in times), min(one for _, one in times)
        print(f"  {key:24} {best[key]:8.3f} {middle:7.3f} {best[key] / best['ceiling']:9.3f} {busiest:9.3f}")
    print(f"  ours ÷ ceiling {own / best['ceiling']:.3f}; torch's best ÷ ours {peer / own:.3f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--micro-batches", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.models:
        report(name, measure(name, given.repeats, given.micro_batches))


if __name__ == "__main__":
    main()
