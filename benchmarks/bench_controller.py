"""Controller time of a pipelined step: everything but the work of the workers.

    python benchmarks/bench_controller.py [--models gpt many] [--workers 2] [--steps 30] [--profile] [--json FILE]

A step is `model(x)`, the loss, `loss.backward()`. For each part the table has the CPU time of the calling thread
(`time.thread_time`: without other threads, although they slow it down by sharing caches and cores). Copies of batch and
targets are listed separately and not counted. The time of torch's engine for as many gradients is listed for
comparison: steps bypass it where that is unobservable (`gemini.runtime.deferred.grad_assignment`). `waiting` is the
remaining wall time: from the call until a worker begins, and from the last action of a worker until `backward()`
returns; it needs an idle machine. `letting go` is `zero_grad`, which frees the gradients of the previous step.

    gpt     the 33.7 M GPT of bench_overlap.py: 133 parameters, 51 of them large
    many    a narrow model of 400 layers: 800 small parameters

Limit: under 3 ms of CPU time per step (median) plus the copy of the inputs, for gpt.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from overlap_models import WORKLOADS
from torch import nn

from gemini import GeminiCompiler, GeminiConfig
from gemini.runtime.interception import dispatch

LIMIT = 3.0  # ms
PARTS = ("model(x)", "loss", "backward()")


class Many(nn.Module):
    """Many small layers."""

    def __init__(self, layers: int = 400, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return x


class Workload(NamedTuple):
    """A model, a batch, its targets and the loss."""

    model: nn.Module
    batch: torch.Tensor
    targets: torch.Tensor
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def gpt(pieces: int, length: int) -> Workload:
    """The GPT, with batches of as many samples as there are micro-batches."""
    own = WORKLOADS["gpt"]
    return Workload(own.make(8), own.batch(pieces)[:, :length], own.targets(pieces)[:, :length], own.loss)


def many(pieces: int, _length: int) -> Workload:
    """The model of many parameters."""
    return Workload(Many(), torch.randn(4 * pieces, 32), torch.randint(0, 32, (4 * pieces,)), F.cross_entropy)


MODELS: dict[str, Callable[[int, int], Workload]] = {"gpt": gpt, "many": many}


class _Given(torch.autograd.Function):
    """Gradients that are there already."""

    @staticmethod
    def forward(ctx: Any, found: list[torch.Tensor], *_: torch.Tensor) -> torch.Tensor:
        """Anything."""
        ctx.found = found
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        """All of them, with no reference left."""
        given = (None, *ctx.found)
        ctx.found.clear()
        return given


class Step(NamedTuple):
    """Milliseconds: computed in each part, letting gradients go, and on the clock beside the work of the workers."""

    parts: tuple[float, ...]
    freeing: float
    outside: float

    @property
    def computed(self) -> float:
        """From the call to the end of backward."""
        return sum(self.parts)


class Bench:
    """A model in its workers."""

    def __init__(self, name: str, given: argparse.Namespace, folder: str) -> None:
        torch.manual_seed(0)
        self.work = MODELS[name](given.micro_batches, given.length)
        self.optimizer = torch.optim.SGD(self.work.model.parameters(), lr=1e-4)
        config = GeminiConfig(
            mode="pipeline", pipeline_degree=given.workers, accum_degree=given.micro_batches, quiet=True,
            run_folder=f"{folder}/{name}",
        )  # fmt: skip
        GeminiCompiler().compiler(self.work.model, config)
        managed = dispatch.find_managed(self.work.model)
        if managed is None or managed.pipelined is None:
            raise RuntimeError("the model is not managed")
        self.overlap, self.pool = managed.pipelined, managed.pool
        self.overlap._trace = self._keep  # type: ignore[method-assign]
        self._ran: Any = None
        for _ in range(4):  # watched, planned for, checked, warm
            self.step()

    def _keep(self, _kind: Any, ran: Any, _step_ms: float) -> None:
        self._ran = ran

    def _span(self) -> float:
        """Seconds from the first action of a worker to the end of the last; nan where no step ran."""
        trace = [] if self._ran is None else self._ran.trace
        return max(event.end for event in trace) - min(event.begin for event in trace) if trace else float("nan")

    def step(self, profile: cProfile.Profile | None = None) -> Step:
        """One step of the program."""
        work, clock = self.work, time.thread_time
        self._ran = None
        began = clock()
        self.optimizer.zero_grad()
        freed = clock()
        start = time.perf_counter()
        if profile is not None:
            profile.enable()
        times = [clock()]
        output = work.model(work.batch)
        times.append(clock())
        loss = work.loss(output, work.targets)
        times.append(clock())
        loss.backward()
        times.append(clock())
        if profile is not None:
            profile.disable()
        outside = time.perf_counter() - start - self._span()
        self.optimizer.step()
        parts = tuple(1e3 * (end - begin) for begin, end in pairwise(times))
        return Step(parts, 1e3 * (freed - began), 1e3 * outside)

    def copying(self) -> float:
        """What the copies of batch and targets take: one is kept, one is sent."""
        begin = time.thread_time()
        for tensor in (self.work.batch, self.work.targets):
            tensor.clone().clone()
        return 1e3 * (time.thread_time() - begin)

    def accumulating(self) -> float:
        """What torch itself takes to put as many gradients into a graph and have them arrive."""
        parameters = list(self.work.model.parameters())
        self.optimizer.zero_grad()
        found = [torch.empty_like(parameter) for parameter in parameters]
        begin = time.thread_time()
        _Given.apply(found, *parameters).backward()
        return 1e3 * (time.thread_time() - begin)

    def end(self) -> None:
        """Let the workers leave."""
        self.pool.stop()


def report(name: str, bench: Bench, given: argparse.Namespace) -> dict[str, Any]:
    """Take steps, and tell what they took."""
    steps = [bench.step() for _ in range(given.steps)]
    if any(step.outside != step.outside for step in steps):
        raise RuntimeError(f"{name} was not overlapped: {'; '.join(bench.overlap.journal.reasons)}")
    copying = statistics.median(bench.copying() for _ in range(given.steps))
    accumulating = statistics.median(bench.accumulating() for _ in range(given.steps))
    own = [step.computed - copying for step in steps]
    found = {
        "model": name, "workers": given.workers, "computed_ms": statistics.median(own), "best_ms": min(own),
        "parts_ms": {part: statistics.median(step.parts[at] for step in steps) for at, part in enumerate(PARTS)},
        "copying_ms": copying, "accumulating_ms": accumulating,
        "letting_go_ms": statistics.median(step.freeing for step in steps),
        "waiting_ms": statistics.median(step.outside for step in steps),
        "shortest_waiting_ms": min(step.outside for step in steps),
    }  # fmt: skip
    parts = ", ".join(f"{part} {value:.2f}" for part, value in found["parts_ms"].items())
    print(
        f"{name}: computed {found['computed_ms']:.2f} ms a step (best {found['best_ms']:.2f}): {parts}; torch's own "
        f"accumulation would be {accumulating:.2f}; copies {copying:.2f}; letting go {found['letting_go_ms']:.2f}; "
        f"waiting {found['waiting_ms']:.2f} (best {found['shortest_waiting_ms']:.2f})"
    )
    if given.profile:
        profile = cProfile.Profile(time.thread_time)
        for _ in range(given.steps):
            bench.step(profile)
        pstats.Stats(profile).sort_stats(given.sort).print_stats(60)
    sys.stdout.flush()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="of the sequences of gpt; shorter ones are quicker")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="print where the time goes, function by function")
    parser.add_argument("--sort", default="tottime")
    parser.add_argument("--json", metavar="FILE", help="where to write all figures")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.models:
            bench = Bench(name, given, folder)
            found.append(report(name, bench, given))
            bench.end()
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1))
    missed = [one["model"] for one in found if one["model"] == "gpt" and one["computed_ms"] > LIMIT]
    if missed:
        sys.exit(f"over {LIMIT:.0f} ms: {', '.join(missed)}")


if __name__ == "__main__":
    main()
