"""A model trains equally with workers on other hosts, which share no memory with the program.

The other host is this one, at the loopback address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from conformance.zoo.classics import CLASSICS
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.runtime.hosts.local_host import CPU, loopback_pool
from tests.training import difference, largest_difference, state_difference, train

SAMPLE = ("batch_norm", "dropout", "tied", "lstm", "conv")  # all of them are slow


@pytest.fixture(scope="module", params=["one of two", pytest.param("both", marks=pytest.mark.slow)])
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    made = loopback_pool(["cpu", CPU] if request.param == "one of two" else [CPU, CPU])
    yield made
    made.stop()


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(size, size), nn.BatchNorm1d(size), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


class Tied(nn.Module):
    """A weight that the first and the last module share, and so two workers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 24)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(4)])
        self.head = nn.Linear(24, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.embed(x.long() % 11)
        for block in self.blocks:
            found = block(found)
        return self.head(found)


def blocks() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[Block(32) for _ in range(4)], nn.Linear(32, 7)).double()


def managed(model: nn.Module, pool: WorkerPool) -> ManagedModel:
    found = ManagedModel(model, pool, quiet=True, strict=True)
    dispatch.manage(model, found)
    return found


Change = Callable[[nn.Module, int], None]


def run(model: nn.Module, change: Change | None = None, steps: int = 6) -> list[Any]:
    """Losses, gradients and random numbers of some steps; `change` is what the program does in between."""
    torch.manual_seed(4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    seen: list[Any] = []
    for step in range(steps):
        if change is not None:
            change(model, step)
        x = torch.randn(6, 32, dtype=torch.float64)
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        seen += [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None], torch.rand(1)]
        optimizer.step()
    return seen


def compare(make: Callable[[], nn.Module], pool: WorkerPool, change: Change | None = None) -> ManagedModel:
    """Training, gradients and final state are the same, to the last bit."""
    reference, model = make(), make()
    expected = run(reference, change)
    known = managed(model, pool)
    found = run(model, change)
    assert len(expected) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    mine, theirs = reference.state_dict(), model.state_dict()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert {unit.worker.index for unit in known.remote_modules.values()} == {0, 1}
    assert not known.refused
    return known


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_training_with_batch_norm_dropout_and_a_step_is_the_same(pool: WorkerPool) -> None:
    compare(blocks, pool)


def test_a_weight_that_two_workers_share_is_the_same(pool: WorkerPool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(5)
        return Tied().double()

    compare(make, pool)


def _write_data(model: nn.Module, step: int) -> None:
    if step > 2:
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
        next(model.parameters()).detach().numpy()[0, 0] = step


def _replace_data(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * (1 + step / 100)


def _load(model: nn.Module, step: int) -> None:
    if step in (2, 4):
        model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})


def _freeze(model: nn.Module, step: int) -> None:
    for at, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(step < 2 or at % 2 == 0)


def _evaluate(model: nn.Module, step: int) -> None:
    model.train(step % 2 == 0)
    with torch.no_grad():
        model(torch.ones(2, 32, dtype=torch.float64))


def _share(model: nn.Module, step: int) -> None:
    """Two parameters of one module share memory from now on, later no more."""
    norm: Any = model.get_submodule("3.norm")
    if step == 3:
        norm.weight.data = norm.bias.data
    elif step == 5:
        norm.weight.data = norm.weight.data.clone()


def _reset_buffers(model: nn.Module, step: int) -> None:
    if step == 3:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.reset_running_stats()


@pytest.mark.parametrize(
    "change",
    [_write_data, _replace_data, _load, _freeze, _evaluate, _share, _reset_buffers],
    ids=lambda one: one.__name__,
)
def test_what_the_program_does_between_steps_counts(change: Change, pool: WorkerPool) -> None:
    compare(blocks, pool, change)


def test_another_dtype_counts(pool: WorkerPool) -> None:
    reference, model = blocks(), blocks()
    managed(model, pool)
    x = torch.randn(4, 32)
    for one in (reference, model):
        torch.manual_seed(0)
        one(x.double())
        one(x.double())
        one.float().eval()
    assert torch.equal(reference(x), model(x))
    assert model(x).dtype is torch.float32


class Clamped(nn.Module):
    """Writes to its own parameter in forward, now and then to a buffer, and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) * 3)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("late", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-1, 1)
        self.seen += 1
        if float(self.seen) > 3:
            self.late.data += 2
        found = x @ self.weight
        if found.requires_grad:
            found.register_hook(lambda gradient: self.late.data.add_(gradient.sum()) and None)
        return found


def test_what_a_unit_writes_comes_home(pool: WorkerPool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(6)
        return nn.Sequential(*[Clamped() for _ in range(4)]).double()

    compare(make, pool)


def test_weights_written_between_forward_and_backward_count(pool: WorkerPool) -> None:
    reference, model = blocks(), blocks()
    managed(model, pool)
    x = torch.randn(4, 32, dtype=torch.float64)
    found = []
    for one in (reference, model):
        for _ in range(3):
            torch.manual_seed(1)
            loss = one(x).sum()
            for parameter in one.parameters():
                parameter.data.mul_(0.5)
            one.zero_grad()
            loss.backward()
        found.append([parameter.grad for parameter in one.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_accumulate_and_inputs_have_gradients(pool: WorkerPool) -> None:
    reference, model = blocks().eval(), blocks().eval()
    managed(model, pool)
    found = []
    for one in (reference, model):
        torch.manual_seed(2)
        x = torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
        one(x)
        loss = one(x).sum() + one(2 * x).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([x.grad, *[parameter.grad for parameter in one.parameters()]])
    assert all(difference(a, b) < 1e-12 for a, b in zip(*found, strict=True))  # summed in another order


def test_micro_batches_run_side_by_side(pool: WorkerPool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(8)
        return nn.Sequential(
            *[nn.Sequential(nn.Linear(32, 300), nn.Tanh(), nn.Linear(300, 32)) for _ in range(4)]
        ).double()

    reference, model = make(), make()
    known = ManagedModel(model, pool, quiet=True, micro_batches=3, strict=True)
    dispatch.manage(model, known)
    for a, b in zip(run(reference), run(model), strict=True):
        assert difference(a, b, 1e-6) < 1e-9  # sums of three


@pytest.mark.parametrize(
    "name", [n if any(s in n for s in SAMPLE) else pytest.param(n, marks=pytest.mark.slow) for n in sorted(CLASSICS)]
)
def test_classics_train_as_on_one_device(name: str, pool: WorkerPool) -> None:
    reference, args, kwargs = CLASSICS[name]()
    expected = train(reference, args, kwargs)
    model, args, kwargs = CLASSICS[name]()
    managed(model, pool)
    found = train(model, args, kwargs)
    limit = 2e-2 if name == "grad_and_autocast_regions" else 1e-6
    assert largest_difference(expected, found) <= limit
    assert state_difference(reference, model) <= limit


def test_copies_of_a_model_that_is_gone_go_too(pool: WorkerPool) -> None:
    model = blocks()
    known = managed(model, pool)
    run(model, steps=2)
    far = [worker for worker in pool.workers if worker.is_remote]
    numbers = set(known.remote_modules)
    assert any(numbers & set(worker.replicas) for worker in far)  # type: ignore[attr-defined]
    del model, known
    assert not any(numbers & set(worker.replicas) for worker in far)  # type: ignore[attr-defined]
