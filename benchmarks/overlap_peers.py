"""The peers of the overlap benchmark: processes that run a step on request and are idle otherwise.

Each process has two roles: a rank of torch.distributed.pipelining, with the stages of a schedule; and one of k
processes that each run a k-th of the micro-batches of the whole model, the upper bound of speed for k processes.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overlap_models import WORKLOADS, Workload, in_equal_parts
from overlap_progress import PROGRESS

from gemini.malloc import keep_freed_memory

# torch's schedules: the name of the class, stages a rank, and whether these lie in a V rather than in a loop.
CHAINS = {
    "gpipe": ("ScheduleGPipe", 1, False),
    "1f1b": ("Schedule1F1B", 1, False),
    "interleaved": ("ScheduleInterleaved1F1B", 2, False),
    "looped": ("ScheduleLoopedBFS", 2, False),
    "zb": ("ScheduleInterleavedZeroBubble", 2, False),
    "zbv": ("ScheduleZBVZeroBubble", 2, True),
    "dualpipev": ("ScheduleDualPipeV", 2, True),
}
_INTERFACES = ("lo", "")  # of gloo; the last: as it finds one itself
_PATIENCE = 60.0  # seconds for a step, and for gloo to wait


class StuckError(RuntimeError):
    """A schedule did not end."""


@dataclass(frozen=True)
class Task:
    """A model of the benchmark, its depth, and in how many pieces its batch comes."""

    name: str
    workers: int
    layers: int
    micro_batches: int

    @property
    def work(self) -> Workload:
        """What is run."""
        return WORKLOADS[self.name]

    def made(self) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
        """The model, a batch and its targets: the same in every process."""
        torch.manual_seed(0)
        return self.work.make(self.layers), self.work.batch(self.micro_batches), self.work.targets(self.micro_batches)


@dataclass(frozen=True)
class Seat:
    """Which of the processes it is, on which cores, and how it reaches the others: without a store it does not."""

    rank: int
    workers: int
    cores: list[int]
    store: str
    interface: str


class Peers:
    """As many processes as workers, which do the same thing at once.

    Those that are `keeping` the memory that they free, as our workers do, run shares of the whole model only.
    """

    def __init__(self, seats: list[list[int]], keeping: bool = False) -> None:
        self.workers, self.seats, self.keeping = len(seats), seats, keeping
        self.task: Task | None = None
        self.warm: list[Any] = []  # what they have done before: the first time takes longer
        self.interface = _INTERFACES[0]
        self._start()

    def _start(self) -> None:
        if self.keeping:
            self._spawn()
            return
        for interface in _INTERFACES[_INTERFACES.index(self.interface) :]:
            self.interface = interface
            self._spawn()
            try:
                self.ask("ready", 120, again=False)
            except RuntimeError as error:
                self.end(0.0)
                PROGRESS.tell(f"peers do not reach each other by {self.interface or 'any interface'}: {error}")
            else:
                return
        raise RuntimeError("the peers cannot reach each other")

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = tempfile.mkdtemp(prefix="overlap-")
        store = "" if self.keeping else f"{self.folder}/store"
        ends = [context.Pipe() for _ in range(self.workers)]
        self.pipes = [mine for mine, _ in ends]
        seats = [Seat(rank, self.workers, cores, store, self.interface) for rank, cores in enumerate(self.seats)]
        self.processes = [
            context.Process(target=serve, args=(seat, theirs), daemon=True)
            for seat, (_, theirs) in zip(seats, ends, strict=True)
        ]
        for process in self.processes:
            process.start()

    def take(self, task: Task) -> None:
        """From now on, this model."""
        self.task, self.warm = task, []
        self.ask(task)

    def ask(self, what: Any, patience: float = _PATIENCE, again: bool = True) -> float:
        """Let all do something; how long it took until all had done it. Others take the place of those that hang."""
        begin = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(what)
        found = []
        for pipe in self.pipes:
            if not pipe.poll(max(0.0, begin + patience - time.perf_counter())):
                rest = [other.recv() for other in self.pipes[len(found) :] if other.poll(0)]
                said = [text for text in (*found, *rest) if text]
                if again:
                    self._again()
                raise StuckError("; ".join([f"not done after {patience:.0f} s", *said[:1]]))
            found.append(pipe.recv())
        seconds = time.perf_counter() - begin
        faults = [one for one in found if one]
        if faults:
            raise RuntimeError(faults[0])
        if isinstance(what, str) and what not in self.warm:
            self.warm.append(what)
        return seconds

    def _again(self) -> None:
        """Other processes in the place of those that are stuck, as far as those had come."""
        self.end(0.0)
        self._start()
        if self.task is not None:
            done = self.warm
            self.take(self.task)
            for what in done:
                self.ask(what, again=False)

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        return [process.pid or 0 for process in self.processes]

    def end(self, patience: float = 5.0) -> None:
        """Let them leave."""
        for pipe in self.pipes:
            if patience:
                pipe.send(None)
        for process in self.processes:
            process.join(patience)
            process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def cpu_seconds(pid: int) -> float:
    """What the threads of a process have computed so far."""
    try:
        return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    except OSError:  # a kernel without these counters
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pin(pid: int, cores: list[int]) -> None:
    """Let all threads of a process run on these cores only."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


# ── in a process ───────────────────────────────────────────────────────────────────────────────────────────────────
def serve(seat: Seat, pipe: Connection) -> None:
    """Do what is asked, one thing after the other."""
    torch.set_num_threads(1)
    pin(os.getpid(), seat.cores)
    rank, workers = seat.rank, seat.workers
    if seat.store:
        _join(seat)
    else:
        keep_freed_memory()
    acts: dict[str, Callable[[], None]] = {}
    task: Task | None = None
    while (what := pipe.recv()) is not None:
        try:
            if isinstance(what, Task):
                task, acts = what, {}
            elif what == "ready":
                _greet(rank, workers)
            elif task is not None:
                if what not in acts:
                    acts[what] = _chain(task, what, rank) if what in CHAINS else _alone(task, what, rank)
                acts[what]()
            pipe.send("")
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}".partition("\n")[0][:300])


def _join(seat: Seat) -> None:
    importlib.import_module("torch.distributed.pipelining")  # here, as it takes seconds
    if seat.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = seat.interface
    dist.init_process_group(
        "gloo", init_method=f"file://{seat.store}", rank=seat.rank, world_size=seat.workers,
        timeout=timedelta(seconds=_PATIENCE),
    )  # fmt: skip


def _greet(rank: int, workers: int) -> None:
    """A tensor to the next, one from the one before: whether they reach each other."""
    number = torch.full((4,), float(rank))
    sent = dist.isend(number, (rank + 1) % workers)
    got = torch.empty(4)
    dist.recv(got, (rank - 1) % workers)
    sent.wait()


def _alone(task: Task, what: str, rank: int) -> Callable[[], None]:
    """A share of the micro-batches for every process; or all of them, for the first."""
    model, batch, targets = task.made()
    shared = range(rank, task.micro_batches, task.workers)
    mine = shared if what == "share" else range(task.micro_batches if rank == 0 else 0)

    def act() -> None:
        model.zero_grad(set_to_none=True)
        for at in mine:
            loss = Workload.loss(model(batch[at : at + 1]), targets[at : at + 1])
            (loss / task.micro_batches).backward()

    return act


def _greeting_others(stage: Any) -> Any:
    """A stage that does not greet its own rank, where the stage after it lies in a V: torch 2.11 hangs by that."""
    greetings = stage._get_init_p2p_neighbors_ops
    stage._get_init_p2p_neighbors_ops = lambda: [one for one in greetings() if one.group_peer != stage.group_rank]
    return stage


def _chain(task: Task, what: str, rank: int) -> Callable[[], None]:
    """A rank of torch's."""
    from torch.distributed import pipelining

    name, chunks, vee = CHAINS[what]
    kind: Any = getattr(pipelining, name, None) or getattr(pipelining.schedules, name, None)
    if kind is None:
        raise LookupError(f"torch {torch.__version__} has no {name}")
    model, batch, targets = task.made()
    total = task.workers * chunks
    parts = in_equal_parts(model, total)
    mine = [rank + at * task.workers for at in range(chunks)]
    if vee:
        mine = [rank, total - 1 - rank]
    stages = [_greeting_others(pipelining.PipelineStage(parts[at], at, total, torch.device("cpu"))) for at in mine]
    schedule = kind(stages[0] if chunks == 1 else stages, task.micro_batches, loss_fn=Workload.loss)
    kept = [parts[at] for at in mine]
    args = (batch,) if 0 in mine else ()
    kwargs = {"target": targets} if total - 1 in mine else {}

    def act() -> None:
        for part in kept:
            part.zero_grad(set_to_none=True)
        schedule.step(*args, **kwargs)

    return act
