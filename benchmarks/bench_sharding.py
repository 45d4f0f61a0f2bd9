"""Shards against their bounds: forward and backward of a GPT on two workers with one thread each.

    python benchmarks/bench_sharding.py --rounds 12

one         one process, the whole batch
ceiling     two processes, half of the batch each: no exchange at all
gemini      `gemini.compile(model, GeminiConfig(mode="sharding", sharding_size=2))`, the public path
dtensor     `parallelize_module` of torch with the plan of Megatron, over gloo

The contenders take turns, so other load meets all of them. Times are medians; the table has their ratio to the ceiling.
Then all-reduces through shared memory and through gloo, by size.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

SIZES = (4 << 10, 512 << 10, 2 << 20)  # bytes


class Block(nn.Module):
    """A block of a transformer, with separate projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the block."""
        h = self.first(x)
        size = self.o.in_features // self.heads
        q, k, v = (layer(h).unflatten(-1, (-1, size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """33.7 million parameters by default; it returns its loss."""

    def __init__(self, width: int = 512, depth: int = 8, vocabulary: int = 16384, heads: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting every next token."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def make(arguments: Any) -> tuple[Gpt, torch.Tensor]:
    """Return the model and a batch, equal in all processes."""
    torch.manual_seed(0)
    model = Gpt(arguments.width, arguments.depth)
    return model, torch.randint(16384, (arguments.batch, arguments.length))


def step(model: nn.Module, ids: torch.Tensor) -> None:
    """Run forward and backward."""
    model.zero_grad()
    model(ids).backward()


# ── contenders in processes of their own ───────────────────────────────────────────────────────────────────────────
def serve(kind: str, rank: int, port: int, arguments: Any, pipe: Any) -> None:
    """Answer each request with one step."""
    torch.set_num_threads(1)
    model, ids = make(arguments)
    if kind == "ceiling":
        ids = ids.chunk(2)[rank]
    if kind == "dtensor":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
        dist.init_process_group("gloo")
        divide_by_dtensor(model)
    while pipe.recv():
        step(model, ids)
        pipe.send(True)


def divide_by_dtensor(model: Gpt) -> None:
    """Apply the plan of Megatron: columns, then rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
        parallelize_module(block, mesh, {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()})


class Processes:
    """Processes that run steps at the same time."""

    def __init__(self, kind: str, count: int, port: int, arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.members = [], []
        for rank in range(count):
            mine, theirs = context.Pipe()
            self.members.append(context.Process(target=serve, args=(kind, rank, port, arguments, theirs), daemon=True))
            self.pipes.append(mine)
            self.members[-1].start()

    def __call__(self) -> None:
        """Run one step in all processes."""
        for pipe in self.pipes:
            pipe.send(True)
        for pipe in self.pipes:
            pipe.recv()

    def stop(self) -> None:
        """End the processes."""
        for member in self.members:
            member.terminate()
            member.join()


def steps(arguments: Any) -> dict[str, float]:
    """Return the median time of a step of every contender, in ms."""
    import gemini

    model, ids = make(arguments)
    gemini.compile(model, gemini.GeminiConfig(mode="sharding", sharding_size=2))
    processes = {
        "one": Processes("one", 1, 0, arguments),
        "ceiling": Processes("ceiling", 2, 0, arguments),
        "dtensor": Processes("dtensor", 2, 29611, arguments),
    }
    contenders = {**processes, "gemini": lambda: step(model, ids)}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(arguments.rounds + 4):
        for name, run in contenders.items():
            began = time.perf_counter()
            run()
            if number >= 4:  # the first ones plan, install and compare
                times[name].append((time.perf_counter() - began) * 1e3)
    for one in processes.values():
        one.stop()
    return {name: statistics.median(found) for name, found in times.items()}


# ── all-reduce ─────────────────────────────────────────────────────────────────────────────────────────────────────
def reduce_many(rank: int, port: int, descriptor: int, rounds: int, queue: Any) -> None:
    """Time all-reduces of every size, by both groups in turn."""
    from gemini.collectives.shared_memory_group import SharedMemoryGroup

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    group = SharedMemoryGroup(descriptor, rank, 2)
    ways = {"shared memory": group.all_reduce, "gloo": dist.all_reduce}
    for size in SIZES:
        x, times = torch.ones(size // 4), {name: list[float]() for name in ways}
        for _ in range(rounds):
            for name, run in ways.items():
                group.barrier()
                began = time.perf_counter()
                run(x.clone())
                times[name].append((time.perf_counter() - began) * 1e6)
        if not rank:
            queue.put((size, {name: statistics.median(found) for name, found in times.items()}))


def reductions(rounds: int) -> list[tuple[int, dict[str, float]]]:
    """Return the median time of an all-reduce per size, in µs."""
    from gemini.collectives.shared_memory_group import allocate_group

    context = multiprocessing.get_context("fork")
    queue, descriptor = context.Queue(), allocate_group(2)
    members = [context.Process(target=reduce_many, args=(rank, 29612, descriptor, rounds, queue)) for rank in (0, 1)]
    for member in members:
        member.start()
    found = [queue.get(timeout=300) for _ in SIZES]
    for member in members:
        member.join()
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for size, found in reductions(max(20, 10 * arguments.rounds)):
        ratio = found["gloo"] / found["shared memory"]
        print(f"all-reduce {size >> 10:5d} KB   shared memory {found['shared memory']:8.0f} µs   gloo {ratio:5.1f} ×")
    found = steps(arguments)
    for name, ms in found.items():
        print(f"{name:10s} {ms:8.1f} ms   {ms / found['ceiling']:5.2f} × the ceiling")


if __name__ == "__main__":
    main()
