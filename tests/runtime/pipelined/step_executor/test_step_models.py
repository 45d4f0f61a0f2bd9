"""Steps of unusual models equal those of one device, with and without split backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steps import Bench, Script, compare, cut, eager
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.schedule.library import library
from gemini.step.worker_program import program_of


class UNet(nn.Module):
    """Skips from the way down to the way up; batch normalisation in evaluation mode, transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1, bias=b > 4) for a, b in ((3, 4), (4, 6), (6, 8)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ((8, 6), (12, 4), (8, 4)))
        self.norm, self.last = nn.BatchNorm2d(4).eval(), nn.Conv2d(4, 2, 1, padding="same")
        self.group = nn.Conv2d(4, 4, 3, padding=1, groups=2)

    def forward(self, x):
        seen = []
        for layer in self.down:
            x = F.relu(layer(x))
            seen.append(x)
        x = self.up[0](seen[2])
        x = self.up[1](torch.cat([x, seen[1]], 1))
        x = self.up[2](torch.cat([x, seen[0]], 1))
        return self.last(self.norm(self.group(x)))


class Pair(nn.Module):
    """Encoder and decoder: everything the encoder made is read by all of the decoder; a mask comes with the call."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(9, width, padding_idx=0)
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.decoder = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.head = nn.Linear(width, 9)

    def forward(self, ids, target, mask):
        memory = self.words(ids) * mask[..., None]
        for layer in self.encoder:
            memory = memory + layer(memory).tanh()
        x = self.words(target)
        for layer in self.decoder:
            x = x + layer(torch.cat([x, memory], -1)).relu()
        return {"logits": self.head(x), "memory": memory}


class Odd(nn.Module):
    """Weight norm, an LSTM, a checkpoint, a custom function, a parameter used directly, a gradient in the forward."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(width, width))
        self.cell = nn.LSTM(width, width, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.scale = nn.Parameter(torch.randn(width))
        self.convolution = nn.Conv1d(width, width, 3, padding=1, dilation=1)
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        x, _ = self.cell(x)
        x = x + checkpoint(self.inner, x, use_reentrant=False)
        x = Doubled.apply(x) * self.scale
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return self.last(F.linear(x, self.inner[0].weight))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class TimeFirst(nn.Module):
    """The batch is the second dimension."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6, sparse=True)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, ids):
        return self.body(self.words(ids))


def classes(*shape: int, of: int = 3) -> torch.Tensor:
    return torch.randint(0, of, shape)


def cross(targets, dims: tuple[int, int] | None = None) -> Script:
    def body(outputs, operand, call):
        logits = (
            call(torch.Tensor.movedim, outputs[0], -1, 1)
            if dims is None
            else call(torch.Tensor.movedim, outputs[0], *dims)
        )
        return call(F.cross_entropy, logits, operand(targets), mean=True)

    return Script(body)


def squares(outputs, operand, call):
    parts = [call(torch.mean, call(torch.square, one), mean=True) for one in outputs]
    total = parts[0]
    for part in parts[1:]:
        total = call(torch.add, total, part)
    return total


Case = tuple[nn.Module, tuple[Any, ...], Script, int | None]


def _pair() -> Case:
    ids, target = classes(6, 4, of=9), classes(6, 4, of=9)
    return Pair().double(), (ids, target, (ids > 2).double()), Script(squares), 0


CASES: dict[str, Callable[[], Case]] = {
    "unet": lambda: (UNet().double(), (torch.randn(6, 3, 8, 8).double(),), Script(squares), 0),
    "pair": _pair,
    "odd": lambda: (Odd().double(), (torch.randn(6, 4, 6).double(),), cross(classes(6, 4)), 0),
    "time first": lambda: (TimeFirst().double(), (torch.randn(5, 6, 8).double(),), Script(squares), 1),
    "sparse": lambda: (Sparse().double(), (classes(6, 4, of=9),), Script(squares), 0),
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_device(pool: WorkerPool, name: str, schedule: str) -> None:
    torch.manual_seed(0)
    model, args, script, dim = CASES[name]()
    loss, wanted = eager(model, args, script)
    piped = cut(model, args, stages=3)
    bench = Bench(piped, pool)
    executor = bench.executor(program_of(piped, library(schedule, 3, 4)))
    request = bench.request(args, (2, 2, 1, 1), script, dims={id(one): dim for one in args})
    for _ in range(2):
        compare(executor.run(request), model, loss, wanted)


def test_gradients_of_inputs_and_of_operands(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(5, 5), nn.Tanh()))).double()
    x, weights = torch.randn(6, 5).double().requires_grad_(), torch.randn(6, 5).double().requires_grad_()
    shift = torch.randn(5).double().requires_grad_()

    def body(outputs, operand, call):
        y = call(torch.mul, call(torch.add, outputs[0], operand(shift, None)), operand(weights))
        return call(torch.mean, y, mean=True)

    script = Script(body)
    loss, wanted = eager(model, (x,), script)
    piped = cut(model, (x,), stages=2)
    bench = Bench(piped, pool)
    request = bench.request((x,), (2, 2, 2), script)
    result = bench.executor(program_of(piped, library("1f1b", 2, 3))).run(request)
    compare(result, model, loss, wanted)
    (given,) = result.input_gradients.values()
    torch.testing.assert_close(given, x.grad)
    found = {id(request.operands[number].tensor): grad for number, grad in result.operand_gradients.items()}
    torch.testing.assert_close(found[id(weights)], weights.grad)
    torch.testing.assert_close(found[id(shift)], shift.grad)


def test_a_loss_that_uses_parameters(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))).double()
    x = torch.randn(6, 5).double()

    def body(outputs, operand, call):
        decay = call(torch.mul, call(torch.sum, call(torch.square, operand(model[0].weight, None))), 0.01, mean=True)
        tied = call(F.linear, outputs[0], operand(model[3].weight, None))
        return call(torch.add, call(torch.mean, call(torch.square, tied), mean=True), decay)

    script = Script(body)
    loss, wanted = eager(model, (x,), script)
    piped = cut(model, (x,), stages=2)
    bench = Bench(piped, pool)
    request = bench.request((x,), (2, 2, 2), script)
    for schedule in ("1f1b", "zb_h1"):
        compare(bench.executor(program_of(piped, library(schedule, 2, 3))).run(request), model, loss, wanted)


def test_frozen_parameters_have_no_gradients(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(5, 5), nn.Tanh()))).double()
    x = torch.randn(6, 5).double()
    script = Script(squares)
    piped = cut(model, (x,), stages=4)
    bench = Bench(piped, pool)
    executor = bench.executor(program_of(piped, library("zb_h1", 4, 3)))
    for frozen in ((), ("0.", "2."), ("2.", "6.bias"), ("0.", "2.", "4.", "6.weight"), ()):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
        loss, wanted = eager(model, (x,), script)
        result = executor.run(bench.request((x,), (2, 2, 2), script))
        compare(result, model, loss, wanted)
        assert all(parameter.requires_grad for parameter, _ in result.gradients)


def test_a_gradient_that_is_held_is_never_written_again(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(2))).double()
    x = torch.randn(4, 40).double()
    piped = cut(model, (x,), stages=2)
    bench = Bench(piped, pool)
    executor = bench.executor(program_of(piped, library("1f1b", 2, 2)))
    request = bench.request((x,), (2, 2), Script(squares))
    held = executor.run(request).gradients
    copies = [gradient.clone() for _, gradient in held]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    for _ in range(3):
        executor.run(request)
    assert all(torch.equal(gradient, copy) for (_, gradient), copy in zip(held, copies, strict=True))


def test_memory_does_not_grow(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).double()
    x = torch.randn(32, 64).double()
    piped = cut(model, (x,), stages=2)
    bench = Bench(piped, pool)
    training = bench.executor(program_of(piped, library("1f1b", 2, 4)))
    evaluation = bench.executor(program_of(piped, library("1f1b", 2, 4)).forward_only())
    sizes = (8, 8, 8, 8)
    taken = []
    for _ in range(6):
        training.run(bench.request((x,), sizes, Script(squares)))
        with torch.no_grad():
            evaluation.run(bench.request((x,), sizes, keep=tuple(bench.results)))
        taken.append(
            [line.mapped.segments.__len__() for worker in pool.workers for line in worker.link.transport.buffers]
        )
    assert taken[2:] == taken[2:3] * 4
