"""The cost of workers: remote calls, tensor transfers, start-up, memory.

    python benchmarks/bench_runtime.py [--only call move start memory cuda]

Limits, on two idle cores: a call of an empty module with 4 KB under 0.3 ms; 16 MB one way at least twice as fast as
gloo over loopback in the same run; workers started and weights placed for a GPT of 33.7 M parameters in under 8 s;
memory of all processes (proportional, without that of an interpreter with torch) at most 1.25 times that of one
process.

`cuda` (on its own, with a GPU and transformers): BERT-large trained by two and four workers that share the GPU, against
one process; out of memory in a worker, the death of one, and what is left on the GPU afterwards.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

REPEATS = 2000
NO_LIMIT = float("inf")
FAST = 10  # percent: what calls take while nothing else has the cores


class Empty(nn.Module):
    """Does next to nothing, elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor."""
        return x.clone()


class Around(nn.Module):
    """A model whose only unit is `Empty`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Empty()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through the unit."""
        return self.inner(x)


class Layer(nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then think."""
        parts = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (8, -1)).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """33.7 M parameters: vocabulary 8192, width 512, 8 layers."""

    def __init__(self, vocabulary: int = 8192, width: int = 512, layers: int = 8) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Tokens to logits."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def call() -> list[tuple[str, float, float]]:
    from gemini.runtime.interception import dispatch
    from gemini.runtime.interception.managed_model import ManagedModel
    from gemini.runtime.pool.worker_pool import WorkerPool

    pool = WorkerPool(1, 1)
    try:
        model = Around()
        dispatch.manage(model, ManagedModel(model, pool, quiet=True))
        x = torch.randn(1024)
        wanting, gradient = x.clone().requires_grad_(), torch.ones(1024)
        for _ in range(50):
            model(wanting).backward(gradient)
        plain = [_timed(lambda: model(x)) for _ in range(REPEATS)]
        forwards, backwards = _both_ways(model, wanting, gradient)
        return [
            *_calls("call of an empty module, 4 KB", plain, 0.3),
            *_calls("the same with a graph", forwards),
            *_calls("its backward", backwards),
        ]
    finally:
        pool.stop()


def _both_ways(model: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> tuple[list[float], list[float]]:
    """Seconds of calls whose graph is kept, and of their backwards."""
    forwards, backwards = [], []
    for _ in range(REPEATS):
        began = time.perf_counter()
        made = model(x)
        forwards.append(time.perf_counter() - began)
        backwards.append(_timed(lambda made=made: made.backward(gradient)))  # type: ignore[misc]
    return forwards, backwards


def _calls(what: str, seconds: list[float], limit: float = NO_LIMIT) -> list[tuple[str, float, float]]:
    """Median and fast calls, in milliseconds."""
    low = statistics.quantiles(seconds, n=100)[FAST - 1]
    return [
        (f"{what} (ms)", statistics.median(seconds) * 1e3, limit),
        (f"{what}, {FAST} % take at most (ms)", low * 1e3, limit),
    ]


def move() -> list[tuple[str, float, float]]:
    from gemini.runtime.transport.channel import Channel
    from gemini.runtime.transport.link import Link

    data = torch.randn(1 << 22)
    here, there = Channel.pair()
    child = os.fork()
    if child == 0:
        here.close()
        link = Link(Channel(there))
        while (found := link.receive()) is not None and found[0] is not None:
            size = found[0].numel()
            del found
            link.send(size)
        os._exit(0)
    there.close()
    link = Link(Channel(here))

    def ours() -> None:
        link.send(data)
        link.receive()

    for _ in range(5):
        ours()
    mine = [_timed(ours) for _ in range(20)]
    link.send(None)
    os.waitpid(child, 0)
    theirs = _gloo(data)
    ratio = statistics.median(mine) / statistics.median(theirs)
    return [("16 MB one way, against gloo on loopback", ratio, 0.5)]


def _gloo(data: torch.Tensor) -> list[float]:
    """Seconds of a message of that size to another process and a small answer, over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        answer = torch.zeros(1)
        child = os.fork()
        if child == 0:
            dist.init_process_group("gloo", init_method=store, rank=1, world_size=2)
            for _ in range(25):
                dist.recv(data, 0)
                dist.send(answer, 0)
            os._exit(0)
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=2)

        def once() -> None:
            dist.send(data, 1)
            dist.recv(answer, 1)

        times = [_timed(once) for _ in range(25)][5:]
        os.waitpid(child, 0)
        dist.destroy_process_group()
        return times


def start() -> list[tuple[str, float, float]]:
    from gemini.runtime.interception import dispatch
    from gemini.runtime.interception.managed_model import ManagedModel
    from gemini.runtime.pool.worker_pool import WorkerPool

    model, ids = Gpt(), torch.randint(0, 8192, (1, 128))
    with torch.no_grad():
        began = time.perf_counter()
        pool = WorkerPool(2, 1)
        managed = ManagedModel(model, pool, quiet=True)
        dispatch.manage(model, managed)
        here = _timed(lambda: model(ids))
        model(ids)
        seconds = time.perf_counter() - began - 2 * here
    pool.stop()
    return [("workers up, weights of the GPT placed (s)", seconds, 8.0)]


def memory() -> list[tuple[str, float, float]]:
    one, many = (_memory(workers) for workers in (0, 2))
    return [("memory of controller and workers, against one process", many / one, 1.25)]


def _memory(workers: int) -> float:
    command = [sys.executable, __file__, "--measure-memory", str(workers)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(found.split()[-1])


def measure_memory(workers: int) -> None:
    """Print the memory of this process and its workers after three training steps, in MB."""
    torch.set_num_threads(1)
    empty = subprocess.run(
        [sys.executable, "-c", "import torch; print(open('/proc/self/smaps_rollup').read())"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    base = _share(empty)
    model, pids = Gpt(), [os.getpid()]
    if workers:
        from gemini.runtime.interception import dispatch
        from gemini.runtime.interception.managed_model import ManagedModel
        from gemini.runtime.pool.worker_pool import WorkerPool

        pool = WorkerPool(workers, 1)
        dispatch.manage(model, ManagedModel(model, pool, quiet=True))
        pids += [worker.process.pid for worker in pool.workers]
    optimizer = torch.optim.AdamW(model.parameters())
    peak = 0.0
    for _ in range(4):
        optimizer.zero_grad()
        ids = torch.randint(0, 8192, (4, 128))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        peak = max(peak, _shares(pids) - base * len(pids))
        loss.backward()
        peak = max(peak, _shares(pids) - base * len(pids))
        optimizer.step()
    print(peak)


def _shares(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as file:
            total += _share(file.read())
    return total


def _share(rollup: str) -> float:
    """The proportional set size in MB."""
    return next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) / 1024


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def cuda() -> list[tuple[str, float, float]]:
    from benchmarks.cuda_trial import trial

    return trial()


PARTS = {"call": call, "move": move, "start": start, "memory": memory}
ALONE = {"cuda": cuda}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[*PARTS, *ALONE], default=list(PARTS))
    parser.add_argument("--measure-memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure_memory is not None:
        measure_memory(options.measure_memory)
        return 0
    torch.set_num_threads(1)
    missed = 0
    for name in options.only:
        for what, found, limit in {**PARTS, **ALONE}[name]():
            missed += found > limit
            bound = f"limit {limit:5.2f}   {'' if found <= limit else 'MISSED'}" if limit != NO_LIMIT else ""
            print(f"{what:58} {found:8.3f}   {bound}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
