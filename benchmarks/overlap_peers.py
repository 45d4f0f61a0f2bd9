"""The peers of the overlap benchmark: processes that take a step when they are told to, and are idle otherwise.

Two ranks of torch.distributed.pipelining, each with the stages that every schedule needs; and two processes that each
run half of the micro-batches of the whole model, which is as fast as two processes can be.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overlap_models import WORKLOADS, Workload, in_equal_parts

CHAINS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2}  # stages a rank


class Pair:
    """Two processes that do the same thing at once."""

    def __init__(self, target: Any, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in range(2)]
        self.pipes = [mine for mine, _ in ends]
        self.processes = [
            context.Process(target=target, args=(rank, theirs, *args), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()
        self.ask("ready")

    def ask(self, what: Any) -> float:
        """Let both do something; how long it took until both had done it."""
        begin = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(what)
        found = [pipe.recv() for pipe in self.pipes]
        seconds = time.perf_counter() - begin
        if any(one is not None for one in found):
            raise RuntimeError(f"{what}: {next(one for one in found if one is not None)}")
        return seconds

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        return [process.pid or 0 for process in self.processes]

    def end(self) -> None:
        """Let them leave."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(10)
            process.kill()


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far, itself and in the system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(pipe: Connection, act: Any) -> None:
    """Do what is asked, one thing after the other."""
    while (what := pipe.recv()) is not None:
        try:
            act(what)
            pipe.send(None)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}"[:500])


# ── the ceiling ────────────────────────────────────────────────────────────────────────────────────────────────────
def half(rank: int, pipe: Connection, name: str, micro_batches: int) -> None:
    """One of two processes with half of the micro-batches each (rank of two); or all of them, if alone."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = WORKLOADS[name]
    model, batch, targets = work.make(), work.batch(micro_batches), work.targets(micro_batches)

    def act(what: Any) -> None:
        if what == "ready":
            return
        model.zero_grad(set_to_none=True)
        mine = range(rank, micro_batches, 2) if what == "half" else range(micro_batches) if not rank else ()
        for at in mine:
            loss = Workload.loss(model(batch[at : at + 1]), targets[at : at + 1])
            (loss / micro_batches).backward()

    serve(pipe, act)


# ── torch.distributed.pipelining ───────────────────────────────────────────────────────────────────────────────────
def rank_of_two(rank: int, pipe: Connection, name: str, micro_batches: int, store: str) -> None:
    """One of two ranks."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    work = WORKLOADS[name]
    torch.manual_seed(0)
    batch, targets = work.batch(micro_batches), work.targets(micro_batches)
    made: dict[str, Any] = {}

    def act(what: Any) -> None:
        if what == "ready":
            return
        if what not in made:
            made[what] = _schedule(what, rank, work, micro_batches)
        schedule, stages, first, last = made[what]
        for stage in stages:
            stage.zero_grad(set_to_none=True)
        schedule.step(*((batch,) if first else ()), **({"target": targets} if last else {}))

    serve(pipe, act)


def _schedule(what: str, rank: int, work: Workload, micro_batches: int) -> Any:
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleZBVZeroBubble,
    )

    torch.manual_seed(0)
    chunks = CHAINS[what]
    parts = in_equal_parts(work.make(), 2 * chunks)
    mine = [rank] if chunks == 1 else [rank, 3 - rank] if what == "zbv" else [rank, rank + 2]
    stages = [PipelineStage(parts[at], at, 2 * chunks, torch.device("cpu")) for at in mine]
    kind = {
        "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
        "zbv": ScheduleZBVZeroBubble,
    }[what]  # fmt: skip
    schedule = kind(stages[0] if chunks == 1 else stages, micro_batches, loss_fn=Workload.loss)
    return schedule, [parts[at] for at in mine], 0 in mine, 2 * chunks - 1 in mine


def torch_ranks(name: str, micro_batches: int) -> Pair:
    """Both ranks, started."""
    folder = tempfile.mkdtemp()
    return Pair(rank_of_two, name, micro_batches, f"{folder}/store")
