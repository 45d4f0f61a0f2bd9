"""CUDA workers: BERT-large in two and four of them, against one process on the same GPU.

python -c "from benchmarks.bench_runtime import main; main()" --only cuda
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
from typing import Any, NamedTuple

import torch
from torch import nn

from gemini.errors import WorkerError
from gemini.runtime.devices.cuda import CudaSegment
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool

STEPS, BATCH, LENGTH, WORDS = 4, 8, 128, 30522
Row = tuple[str, float, float]


class Greedy(nn.Module):
    """Requests more memory than the device has, on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, greedy: bool) -> torch.Tensor:
        """A layer; a terabyte if `greedy`."""
        x = self.linear(x)
        return x + torch.empty(1 << 38, device=x.device).sum() if greedy else x


class Pair(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Greedy(), Greedy()

    def forward(self, x: torch.Tensor, greedy: bool = False) -> torch.Tensor:
        """One after the other."""
        return self.two(self.one(x, False), greedy)


class Run(NamedTuple):
    """What a training did."""

    losses: list[float]
    gradients: list[torch.Tensor]  # of the last step
    weights: list[torch.Tensor]
    milliseconds: float
    used: int  # bytes of the GPU, by all processes, at the most
    calls: int = 0


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    model: nn.Module = BertForMaskedLM(config)
    return model.cuda()


def used() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def train(model: nn.Module, steps: int = STEPS) -> Run:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    losses, peak, seconds = [], 0, 0.0
    for step in range(steps):
        ids = torch.randint(0, WORDS, (BATCH, LENGTH)).cuda()
        torch.cuda.synchronize()
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        peak = max(peak, used())
        loss.backward()
        optimizer.step()
        peak = max(peak, used())
        losses.append(loss.item())
        seconds = time.perf_counter() - began
        print(f"    step {step}: loss {losses[-1]:.7f}, {seconds * 1e3:.0f} ms", flush=True)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return Run(losses, gradients, [p.detach().clone() for p in model.parameters()], seconds * 1e3, peak)


def difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest, relative to the largest entry of each tensor."""
    return max(float((a - b).abs().max()) / max(float(a.abs().max()), 1e-12) for a, b in zip(one, other, strict=True))


def managed_run(workers: int) -> tuple[Run, WorkerPool, nn.Module]:
    model = bert()
    pool = WorkerPool(workers, 2, devices=["cuda:0"] * workers)
    managed = ManagedModel(model, pool)
    dispatch.manage(model, managed)
    found = train(model)._replace(calls=managed.calls)
    print(f"    calls {managed.calls}, refused {managed.refused}, demotions {managed.demotions}", flush=True)
    return found, pool, model


def trial(counts: tuple[int, ...] = (2, 4)) -> list[Row]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.empty(1, device="cuda")
    base = used()
    print(f"GPU in use with one context: {base >> 20} MiB; {_processes()}", flush=True)
    rows: list[Row] = []
    reference = train(bert())
    clean()
    after = used()  # with the code and workspaces of the GPU that a training of one process leaves there
    kept = sum(t.nbytes for t in [*reference.gradients, *reference.weights])
    for workers in counts:
        clean()
        before = used()
        found, pool, model = managed_run(workers)
        processes = _processes()
        losses = max(abs(a - b) for a, b in zip(reference.losses, found.losses, strict=True))
        rows += [
            (f"{workers} workers: losses differ by", losses, 1e-6),
            (f"{workers} workers: gradients differ by", difference(reference.gradients, found.gradients), 1e-6),
            (f"{workers} workers: weights differ by", difference(reference.weights, found.weights), 1e-6),
        ]  # fmt: skip
        own = found.used - kept
        print(
            f"{workers} workers: {found.milliseconds:.0f} ms a step (one process {reference.milliseconds:.0f}), "
            f"{own >> 20} MiB (one process {reference.used >> 20}); before {before >> 20}; {processes}",
            flush=True,
        )
        if workers == counts[-1]:
            rows += death(pool, model)
        pool.stop()
        del found, model, pool
        say_left(f"{workers} workers", after)
    rows += greed()
    say_left("the last", after)
    left = used() - after
    print(
        f"left on the GPU: {left >> 20} MiB more than one process leaves ({(after - base - kept) >> 20} MiB beside its "
        f"own tensors); {_processes()}",
        flush=True,
    )
    rows.append(("left on the GPU at the end (MiB)", left / (1 << 20), 64.0))
    rows.append(("processes on the GPU at the end", float(_processes().count("\n") + 1), 1.0))
    return rows


def death(pool: WorkerPool, model: nn.Module) -> list[Row]:
    """Kill a worker: gradients and weights stay readable, the next call says so, the one after it runs here."""
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    os.kill(pool.workers[1].process.pid, signal.SIGKILL)
    pool.workers[1].process.wait()
    ids = torch.randint(0, WORDS, (BATCH, LENGTH)).cuda()
    began = time.perf_counter()
    said = "nothing"
    try:
        model(input_ids=ids, labels=ids)
    except WorkerError as error:
        said = str(error)
    seconds = time.perf_counter() - began
    print(f"killed: {said}", flush=True)
    torch.cuda.synchronize()
    after = [p.grad for p in model.parameters() if p.grad is not None]
    same = difference(before, after)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.cuda.synchronize()
    print(f"after that, here: loss {loss.item():.4f}", flush=True)
    return [("seconds until the death of a worker is told", seconds, 10.0), ("gradients after it differ by", same, 0.0)]


def greed() -> list[Row]:
    """Out of memory in a worker is said as such, and the next call works."""
    model = Pair().cuda()
    pool = WorkerPool(2, 1, devices=["cuda:0"] * 2)
    managed = ManagedModel(model, pool)
    dispatch.manage(model, managed)
    x = torch.randn(8, 64, device="cuda")
    said: Any = None
    try:
        for greedy in (False, False, True):
            model(x, greedy).sum().backward()
    except torch.OutOfMemoryError as error:
        said = error
    print(f"out of memory: {type(said).__name__}: {str(said)[:200]} {getattr(said, '__notes__', None)}", flush=True)
    model(x).sum().backward()
    pool.stop()
    is_told = said is not None and "worker" in str(getattr(said, "__notes__", ""))
    return [("out of memory in a worker that is not told", float(not is_told), 0.0)]


def say_left(what: str, after: int) -> None:
    """What a part of the trial leaves on the GPU: segments that we have not closed, or memory that the driver keeps."""
    clean()
    ours = [one.size >> 20 for one in gc.get_objects() if type(one) is CudaSegment]
    print(f"    left by {what}: {(used() - after) >> 20} MiB; segments still open (MiB): {ours}", flush=True)


def clean() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _processes() -> str:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
