"""State between steps: buffers, random numbers, weights and modes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from steps import Bench, Script, compare, cut, eager
from torch import nn

from gemini.planner.microbatch_split import find_batch_dims
from gemini.planner.rng_analysis import record_stage_rng
from gemini.random_numbers.rng_state import get_state
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.schedule.library import library
from gemini.step.worker_program import program_of


def squares(outputs, operand, call):
    return call(torch.mean, call(torch.square, outputs[0]), mean=True)


def test_buffers_are_written_in_the_model_itself(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(4, 4), nn.BatchNorm1d(4)))).double()
    x = torch.randn(8, 4).double()
    piped = cut(model, (x[:4],), stages=3)
    before = [buffer.clone() for buffer in model.buffers()]
    for part in x.split(4):
        model(part)
    wanted = [buffer.clone() for buffer in model.buffers()]
    for buffer, old in zip(model.buffers(), before, strict=True):
        buffer.copy_(old)
    bench = Bench(piped, pool)
    executor = bench.executor(program_of(piped, library("1f1b", 3, 2), recompute={0, 1}))
    executor.run(bench.request((x,), (4, 4), Script(squares)))
    for buffer, want in zip(model.buffers(), wanted, strict=True):
        torch.testing.assert_close(buffer, want)


@pytest.mark.parametrize(("schedule", "stages", "recompute"), [("1f1b", 2, ()), ("zb_v", 4, ()), ("1f1b", 2, (0,))])
def test_random_numbers_are_those_of_one_device(pool: WorkerPool, schedule: str, stages: int, recompute) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.4)))).double()
    x = torch.randn(6, 6).double()
    piped = cut(model, (x[:2],), stages=stages)
    batch = find_batch_dims(model, (x,), {})
    assert batch is not None
    draws, _ = record_stage_rng(piped, (x,), {}, batch)
    bench = Bench(piped, pool)
    executor = bench.executor(program_of(piped, library(schedule, 2, 3), rng_patterns=draws, recompute=recompute))
    for seed in range(2):
        torch.manual_seed(seed)
        start = get_state()
        loss, wanted = eager(model, (x,), Script(squares))
        result = executor.run(bench.request((x,), (2, 2, 2), Script(squares), generator=start))
        compare(result, model, loss, wanted)
        assert result.generator == get_state()


def test_what_the_program_changes_between_steps(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.1), nn.Linear(4, 4), nn.Dropout(0.5)).double().eval()
    x = torch.randn(6, 4).double()
    piped = cut(model, (x,), stages=2)
    bench = Bench(piped, pool)
    executor = bench.executor(program_of(piped, library("1f1b", 2, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def check() -> None:
        loss, wanted = eager(model, (x,), Script(squares))
        result = executor.run(bench.request((x,), (2, 2, 2), Script(squares)))
        compare(result, model, loss, wanted)
        for parameter, gradient in result.gradients:
            parameter.grad = gradient

    check()
    optimizer.step()
    check()
    model[0].weight.data = torch.randn(4, 4).double()
    check()
    model[1].negative_slope = 0.7
    check()
    with torch.no_grad():
        model[2].bias.fill_(3.0)
    check()


def test_values_of_the_loss_can_be_fetched(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))).double()
    x, y = torch.randn(6, 4).double(), torch.randint(0, 4, (6,))
    piped = cut(model, (x,), stages=2)
    bench = Bench(piped, pool)
    executor = bench.executor(program_of(piped, library("1f1b", 2, 3)))

    def body(outputs, operand, call):
        return call(torch.mean, call(F.cross_entropy, outputs[0], operand(y), reduction="none"), mean=True)

    script = Script(body)
    result = executor.run(bench.request((x,), (3, 2, 1), script, keep_values=(2,), keep=tuple(bench.results)))
    logits = model(x)
    torch.testing.assert_close(result.outputs[bench.results[0]].concatenate(0), logits)
    torch.testing.assert_close(result.outputs["#2"].concatenate(0), F.cross_entropy(logits, y, reduction="none"))


def test_autocast(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(2) for m in (nn.Linear(8, 8), nn.ReLU())))
    x = torch.randn(6, 8)
    piped = cut(model, (x,), stages=2)
    bench = Bench(piped, pool)
    executor = bench.executor(program_of(piped, library("zb_h1", 2, 3)))
    with torch.autocast("cpu", torch.bfloat16):
        loss, wanted = eager(model, (x,), Script(squares))
        result = executor.run(bench.request((x,), (2, 2, 2), Script(squares)))
    compare(result, model, loss, wanted, within=2e-2)


def test_training_and_evaluation_in_turn_with_parameters_frozen_in_between(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(2) for m in (nn.Linear(4, 4), nn.Dropout(0.5)))).double().eval()
    x = torch.randn(4, 4).double()
    piped = cut(model, (x,), stages=2)
    bench = Bench(piped, pool)
    program = program_of(piped, library("1f1b", 2, 2))
    training, evaluation = bench.executor(program), bench.executor(program.forward_only())

    def train() -> None:
        loss, wanted = eager(model, (x,), Script(squares))
        compare(training.run(bench.request((x,), (2, 2), Script(squares))), model, loss, wanted)

    train()
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        evaluation.run(bench.request((x,), (2, 2)))
    model[0].weight.requires_grad_(True)
    train()


def test_a_loss_with_a_parameter_of_another_model(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), nn.Linear(4, 4).double()
    x = torch.randn(4, 4).double()
    piped = cut(model, (x,), stages=2)
    bench = Bench(piped, pool)
    bench.shared_parameters.share(other.parameters())

    def body(outputs, operand, call):
        made = call(F.linear, outputs[0], operand(other.weight, None), operand(other.bias, None))
        return call(torch.mean, call(torch.square, made), mean=True)

    script = Script(body)
    loss, wanted = eager(model, (x,), script)
    grads = [p.grad for p in other.parameters()]
    result = bench.executor(program_of(piped, library("zb_h1", 2, 2))).run(bench.request((x,), (2, 2), script))
    found = {id(parameter): gradient for parameter, gradient in result.gradients}
    for parameter, gradient in zip(other.parameters(), grads, strict=True):
        torch.testing.assert_close(found[id(parameter)], gradient)
    own = [pair for pair in result.gradients if all(pair[0] is not p for p in other.parameters())]
    result.owners, result.tensors = [owner for owner, _ in own], [gradient for _, gradient in own]
    compare(result, model, loss, wanted)
