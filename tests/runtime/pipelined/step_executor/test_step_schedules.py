"""Every library schedule and composed schedule yields the loss and gradients of one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from steps import Bench, Script, compare, cut, eager
from torch import nn

from gemini.errors import InvalidPlanError
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.schedule import Composer, placement
from gemini.schedule.library import library
from gemini.step.worker_program import make_program, program_of


class Tied(nn.Module):
    """Embedding and head with one weight, a value from the beginning that the end reads, two outputs."""

    def __init__(self, layers: int = 8, width: int = 6, words: int = 11) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        first = x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x)
        x = self.norm(x + first)
        return self.head(x), x


def loss_of(targets):
    def body(outputs, operand, call):
        logits, hidden = outputs
        main = call(F.cross_entropy, call(torch.Tensor.transpose, logits, 1, 2), operand(targets), mean=True)
        size = call(torch.mean, call(torch.square, hidden), mean=True)
        return call(torch.add, main, call(torch.mul, size, 0.1))

    return Script(body)


@pytest.fixture(scope="module")
def made():
    torch.manual_seed(0)
    model = Tied().double()
    ids, targets = torch.randint(0, 11, (8, 5)), torch.randint(0, 11, (8, 5))
    script = loss_of(targets)
    pipes = {count: cut(model, (ids,), stages=count) for count in (2, 4, 8)}
    return model, ids, script, pipes, eager(model, (ids,), script)


LIBRARY = [
    ("gpipe", 2, 2), ("1f1b", 2, 2), ("1f1b", 4, 4), ("interleaved_1f1b", 2, 4), ("interleaved_1f1b", 4, 8),
    ("looped_bfs", 2, 4), ("zb_h1", 4, 4), ("zb_h2", 4, 4), ("interleaved_zb", 2, 4), ("zb_v", 2, 4), ("zb_v", 4, 8),
    ("dualpipe_v", 2, 4),
]  # fmt: skip


def check(made, pool: WorkerPool, plan, stages: int, sizes=(1,) * 8, **more) -> None:
    model, ids, script, pipes, (loss, wanted) = made
    program = program_of(pipes[stages], plan, **more)
    bench = Bench(pipes[stages], pool)
    executor = bench.executor(program)
    for _ in range(2):
        compare(executor.run(bench.request((ids,), sizes, script)), model, loss, wanted)


@pytest.mark.parametrize(("name", "workers", "stages"), LIBRARY)
def test_schedules_of_the_library(made, pool: WorkerPool, name: str, workers: int, stages: int) -> None:
    check(made, pool, library(name, workers, 8), stages)


def test_chimera_has_the_same_weights_in_both_directions(made, pool: WorkerPool) -> None:
    """Its two replicas are the same weights here: stages 2 and 3 of the plan are 0 and 1 on other micro-batches."""
    check(made, pool, library("chimera", 2, 4), 2)
    model, ids, script, pipes, _ = made
    bench = Bench(pipes[2], pool)
    executor = bench.executor(program_of(pipes[2], library("chimera", 2, 4)))
    result = executor.run(bench.request((ids,), (1,) * 8, script, keep=tuple(bench.results)))
    for name, want in zip(bench.results, model(ids), strict=True):
        torch.testing.assert_close(result.outputs[name].concatenate(0), want.detach())


@pytest.mark.parametrize(("shape", "workers", "split"), [
    ("vshape", 4, False), ("vshape", 4, True), ("vchunks", 2, True), ("interleaved", 2, False), ("xshape", 4, False),
])  # fmt: skip
def test_composed_schedules(made, pool: WorkerPool, shape: str, workers: int, split: bool) -> None:
    blocks = placement(shape, workers, split=split)
    pairs = 4 if shape == "xshape" else 8
    plan = Composer().compose(blocks, memory=2 * workers).unroll(pairs)
    stages = 1 + max(block.stage for block in blocks)
    check(made, pool, plan, stages // 2 if shape == "xshape" else stages)


@pytest.mark.parametrize("sizes", [(3, 3, 2), (8,), (1, 7), (2, 2, 2, 2)])
def test_uneven_micro_batches(made, pool: WorkerPool, sizes) -> None:
    check(made, pool, library("1f1b", 2, len(sizes)), 2, sizes)


@pytest.mark.parametrize("recompute", [{0}, {0, 1, 2, 3}])
def test_recomputation(made, pool: WorkerPool, recompute) -> None:
    check(made, pool, library("zb_h1", 4, 8), 4, recompute=recompute)


def test_orders_of_actions(made, pool: WorkerPool) -> None:
    """A plan need not be a SchedPlan, nor have a stage always in the same place among its neighbours."""
    rows = [
        ["0F0", "0F1", "3F0", "3B0", "3F1", "3B1", "0B1", "0B0"],
        ["1F0", "2F0", "1F1", "2F1", "2B0", "2B1", "1B1", "1B0"],
    ]
    check(made, pool, rows, 4, (4, 4))


@pytest.mark.parametrize("only", [True, False])
def test_evaluation_is_pipelined_too(made, pool: WorkerPool, only: bool) -> None:
    """By a program for it, or by one for training, whose backward actions are left out."""
    model, ids, _, pipes, _ = made
    program = make_program(pipes[4].interfaces, library("1f1b", 4, 4))
    bench = Bench(pipes[4], pool)
    executor = bench.executor(program.forward_only() if only else program)
    with torch.no_grad():
        wanted = model(ids)
        for _ in range(3):
            result = executor.run(bench.request((ids,), (2, 2, 2, 2), keep=tuple(bench.results)))
            for name, want in zip(bench.results, wanted, strict=True):
                torch.testing.assert_close(result.outputs[name].concatenate(0), want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", ["alphafold"])
def test_stages_without_a_backward(pool: WorkerPool, shape: str) -> None:
    """A composed plan in which only the last stages are trained, the others frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(5, 5), nn.Tanh()))).double()
    x = torch.randn(6, 5).double()
    piped = cut(model, (x,), stages=12)
    blocks = placement(shape, 4)
    plan = Composer().compose(blocks, memory=8).unroll(6)
    for stage in piped.stages[:8]:
        stage.requires_grad_(False)
    script = Script(lambda outputs, operand, call: call(torch.mean, call(torch.square, outputs[0]), mean=True))
    loss, wanted = eager(model, (x,), script)
    bench = Bench(piped, pool)
    executor = bench.executor(program_of(piped, plan))
    compare(executor.run(bench.request((x,), (1,) * 6, script)), model, loss, wanted)
    model[0].requires_grad_(True)
    with pytest.raises(InvalidPlanError, match="stages \\[0\\] train parameters"):
        executor.run(bench.request((x,), (1,) * 6, script))
