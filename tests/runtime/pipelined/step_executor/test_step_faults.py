"""A failed step raises the user's exception, leaves no trace, and the next step works."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from steps import Bench, Script, compare, cut, eager
from torch import nn

from gemini.errors import InvalidPlanError, WorkerError
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.step_messages import AbortStep
from gemini.runtime.transport.channel import Channel
from gemini.runtime.transport.link import Link
from gemini.runtime.worker.p2p import PeerLinks, StepAborted
from gemini.schedule.library import library
from gemini.step.worker_program import make_program, program_of


class Fragile(nn.Module):
    """Raises on a large input; counts with batch normalisation what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.middle, self.late, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), Checked()

    def forward(self, x):
        return self.last(self.late(self.middle(self.norm(self.first(x)))), x)


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x, given):
        if given.abs().max() > 100:
            raise TooLarge(f"{given.abs().max():.0f} is too much")
        return self.out(x)


class TooLarge(ValueError):
    """An exception of the model's own."""


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.saved_tensors[0].abs().max() > 100:
            raise TooLarge("in the backward")
        return gradient


class Late(nn.Module):
    """Raises in the backward of its first part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(Backwards.apply(self.first(x)))


def squares(outputs, operand, call):
    return call(torch.mean, call(torch.square, outputs[0]), mean=True)


def test_what_a_stage_raises_is_raised_here_and_undone(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model, x = Fragile().double(), torch.randn(8, 4).double()
    piped = cut(model, (x[:4],), stages=3, basic_blocks=(Checked,))
    bench = Bench(piped, pool)
    executor = bench.executor(program_of(piped, library("1f1b", 3, 4)))
    script = Script(squares)
    executor.run(bench.request((x,), (2,) * 4, script))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    bad = x.clone()
    bad[5] = 1000.0
    for _ in range(2):
        with pytest.raises(TooLarge, match="1000 is too much") as caught:
            executor.run(bench.request((bad,), (2,) * 4, script))
        (note,) = caught.value.__notes__
        assert "in worker 2, forward of stage 2, micro-batch 2" in note
        assert "in last" in note
        assert "stage_2.py:" in note
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    result = executor.run(bench.request((x,), (2,) * 4, script))
    assert result.root is not None
    assert len(result.gradients) == len(list(model.parameters()))


def test_a_backward_that_raises(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model, x = Late().double(), torch.randn(4, 4).double()
    piped = cut(model, (x,), stages=2)
    bench = Bench(piped, pool)
    executor = bench.executor(program_of(piped, library("1f1b", 2, 2)))
    with pytest.raises(TooLarge) as caught:
        executor.run(bench.request((x * 1e6,), (2, 2), Script(squares)))
    assert "backward of stage" in caught.value.__notes__[0]


def test_a_loss_that_raises(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), torch.randn(4, 4).double()
    piped = cut(model, (x,), stages=2)
    bench = Bench(piped, pool)
    executor = bench.executor(program_of(piped, library("1f1b", 2, 2)))
    script = Script(lambda outputs, operand, call: call(torch.matmul, outputs[0], operand(torch.zeros(7), None)))
    with pytest.raises(RuntimeError) as caught:
        executor.run(bench.request((x,), (2, 2), script))
    assert "matmul of the loss" in caught.value.__notes__[0]
    loss, wanted = eager(model, (x,), Script(squares))
    compare(executor.run(bench.request((x,), (2, 2), Script(squares))), model, loss, wanted)


def test_a_worker_that_is_killed_is_an_error_soon() -> None:
    own = WorkerPool(2, 1)
    try:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 4), Slow(), nn.Linear(4, 4)).double(), torch.randn(4, 4).double()
        piped = cut(model, (x,), stages=2)
        bench = Bench(piped, own)
        executor = bench.executor(program_of(piped, library("1f1b", 2, 2)))
        executor.run(bench.request((x,), (2, 2), Script(squares)))
        model[1].pause.fill_(30.0)
        timer = threading.Timer(1.0, os.kill, (own.workers[1].process.pid, signal.SIGKILL))
        timer.start()
        begin = time.monotonic()
        with pytest.raises(WorkerError, match="SIGKILL"):
            executor.run(bench.request((x,), (2, 2), Script(squares)))
        assert time.monotonic() - begin < 11
    finally:
        own.stop()


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pause", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        time.sleep(float(self.pause))
        return x * self.scale


# ── plans that do not fit ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def two():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    return cut(model, (torch.randn(4, 4).double(),), stages=2)


@pytest.mark.parametrize(("rows", "said"), [
    ([["0F0", "0B0"], ["1F0", "1B0"], ["2F0", "2B0"]], "it has 3 stages, the model has 2"),
    ([["0F0", "0B0", "0F0"], ["1F0", "1B0"]], "0F0 comes twice"),
    ([["0F0", "0B0"], ["1F0", "1I0"]], "1W0 is missing"),
    ([["0F0", "0B0"], ["1B0"]], "1F0 is missing"),
    ([["0F0", "0B0", "0W0"], ["1F0", "1B0"]], "both there"),
    ([["0F0", "1B0"], ["1F0", "0B0"]], "on several workers"),
    ([["0F0", "0(loss)0", "0B0"], ["1F0", "1B0"]], "neither forward nor backward"),
    ([[], []], "no actions"),
])  # fmt: skip
def test_plans_that_do_not_fit(two, rows, said: str) -> None:
    with pytest.raises(InvalidPlanError, match=said.replace("(", r"\(")):
        program_of(two, rows)


def test_a_plan_that_waits_for_itself_is_refused(two, pool: WorkerPool) -> None:
    program = program_of(two, [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])
    executor = Bench(two, pool).executor(program)
    with pytest.raises(InvalidPlanError, match="deadlock") as caught:
        executor.run(Bench(two, pool).request((torch.randn(4, 4).double(),), (2, 2), Script(squares)))
    assert "worker 1 is at 1F1, which needs 0F1" in str(caught.value)


def test_a_plan_that_breaks_its_memory_is_refused(two) -> None:
    with pytest.raises(InvalidPlanError, match="holds"):
        make_program(two.interfaces, library("gpipe", 2, 4), memory=2)


def test_other_numbers_of_workers_and_micro_batches(two, pool: WorkerPool) -> None:
    rows = [["0F0", "0B0"], ["1F0", "1B0"], [], [], []]
    with pytest.raises(InvalidPlanError, match="a plan for 5 workers, the pool has 4"):
        Bench(two, pool).executor(program_of(two, rows))
    executor = Bench(two, pool).executor(program_of(two, library("1f1b", 2, 4)))
    with pytest.raises(InvalidPlanError, match="4 micro-batches, the step has 2"):
        executor.run(Bench(two, pool).request((torch.randn(4, 4).double(),), (2, 2), Script(squares)))


def test_what_came_together_with_a_request_is_heard() -> None:
    here, there = (Link(Channel(end), side) for side, end in enumerate(Channel.pair()))
    for step in (6, 7):
        here.send(AbortStep(step, step))
    there.receive()  # reads both at once
    peers = PeerLinks(there)
    peers.begin(7, lambda parcel: None)
    with pytest.raises(StepAborted):
        peers.receive(0)
