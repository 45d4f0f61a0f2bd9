"""Whatever shares memory in a program shares it in workers' programs too, with the same values, at every step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.memory.shared_layout import is_in_segment
from gemini.runtime.pool.worker_pool import WorkerPool

WIDTH = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.two(torch.tanh(self.one(x))))
        return self.four(torch.tanh(self.three(self.norm(h))))


@dataclass
class Case:
    """A model with its optimizer, and tensors of the program that may share the model's memory."""

    model: Net
    optimizer: torch.optim.Optimizer
    aliases: list[torch.Tensor] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers(), *self.aliases]

    def sharing(self) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
        """For each tensor, the first one that is on the same memory, and its place there."""
        places = [one.untyped_storage().data_ptr() for one in self.tensors()]
        return [
            (places.index(place), one.storage_offset(), tuple(one.shape), one.stride())
            for place, one in zip(places, self.tensors())
        ]

    def values(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.tensors()]


# ── how tensors share memory before ────────────────────────────────────────────────────────────────────────────────
def flatten(model: Net) -> None:
    flat = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    begin = 0
    for one in model.parameters():
        one.data = flat[begin : begin + one.numel()].view_as(one)
        begin += one.numel()


def tie(model: Net) -> None:
    model.four.weight = model.one.weight


def tie_memory(model: Net) -> None:
    model.three.weight.data = model.one.weight.data.t()


FORMS: dict[str, Callable[[Net], None]] = {
    "plain": lambda _: None, "flat": flatten, "tied": tie, "one memory": tie_memory,
}  # fmt: skip
ALIASES: dict[str, Callable[[Net], list[torch.Tensor]]] = {
    "state dict": lambda model: [*model.state_dict().values()],
    "data": lambda model: [one.data for one in model.parameters()],
    "views": lambda model: [model.one.weight.data[1:], model.two.weight.data.t(), model.two.bias.detach()[::2]],
    "statistics": lambda model: [model.norm.running_mean[:2]],
    "teacher": lambda model: [nn.Parameter(model.three.weight.data, requires_grad=False)],
    "storage": lambda model: [torch.empty(0).set_(model.one.weight.untyped_storage())],
}


# ── what the program does between steps ───────────────────────────────────────────────────────────────────────────
def replace_data(case: Case) -> None:
    case.model.two.weight.data = case.model.two.weight.data * 0.5


def swap_and_return(case: Case) -> None:
    weight = case.model.one.weight
    backup, weight.data = weight.data, torch.full_like(weight.data, 0.1)
    with torch.no_grad():
        case.model(torch.ones(3, WIDTH))
    weight.data = backup


def assign(case: Case) -> None:
    held = {name: value.detach().clone() for name, value in case.model.state_dict().items()}
    case.model.load_state_dict(held, assign=True)
    case.aliases += held.values()


def turn(case: Case) -> None:
    case.model.two.weight.data = case.model.two.weight.data.t()


def write_alias(case: Case) -> None:
    for alias in case.aliases[:2]:
        with torch.no_grad():
            alias.mul_(0.5)


def add_alias(case: Case) -> None:
    case.aliases += [case.model.four.weight.detach(), case.model.three.bias.data[1:]]


CHANGES: dict[str, Callable[[Case], None]] = {
    "none": lambda _: None, "replace": replace_data, "swap": swap_and_return, "assign": assign, "turn": turn,
    "write": write_alias, "new alias": add_alias,
}  # fmt: skip


def build(form: str, aliases: list[str]) -> Case:
    torch.manual_seed(3)
    model = Net()
    FORMS[form](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Case(model, optimizer, [one for name in aliases for one in ALIASES[name](model)])


def step(case: Case, at: int) -> float:
    generator = torch.Generator().manual_seed(at)
    x, y = torch.randn(6, WIDTH, generator=generator), torch.randint(WIDTH, (6,), generator=generator)
    case.optimizer.zero_grad()
    loss = F.cross_entropy(case.model(x), y)
    loss.backward()
    case.optimizer.step()
    return loss.item()


def manage(model: nn.Module, pool: WorkerPool) -> ManagedModel:
    managed = ManagedModel(model, pool, quiet=True, strict=True)
    dispatch.manage(model, managed)
    return managed


def check_equal(case: Case, plain: Case) -> None:
    assert case.sharing() == plain.sharing()
    for one, other in zip(case.values(), plain.values()):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    form=st.sampled_from([*FORMS]),
    aliases=st.lists(st.sampled_from([*ALIASES]), unique=True, max_size=3),
    changes=st.lists(st.sampled_from([*CHANGES]), min_size=1, max_size=4),
)
def test_what_shares_memory_shares_it_with_workers(
    form: str, aliases: list[str], changes: list[str], pool: WorkerPool
) -> None:
    case, plain = build(form, aliases), build(form, aliases)
    managed = manage(case.model, pool)
    for at, change in enumerate(["none", "none", *changes]):
        for one in (case, plain):
            CHANGES[change](one)
        assert step(case, at) == pytest.approx(step(plain, at), rel=1e-5)
        check_equal(case, plain)
    assert managed.calls
    assert all(is_in_segment(remote.module.weight.untyped_storage()) for remote in managed.remote_modules.values()
               if isinstance(remote.module, nn.Linear))  # fmt: skip


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_what_shares_memory_shares_it_after_the_workers(end: str) -> None:
    pool = WorkerPool(2, 1)
    try:
        case, plain = (build("flat", [*ALIASES]) for _ in range(2))
        managed = manage(case.model, pool)
        managed.record.strict, managed.record.survives = False, True
        for at in range(6):
            if at == 3 and end == "kill":
                os.kill(pool.workers[1].process.pid, signal.SIGKILL)
            elif at == 3:
                pool.stop()
            assert step(case, at) == pytest.approx(step(plain, at), rel=1e-5)
            for one in (case, plain):
                write_alias(one)
            check_equal(case, plain)
        assert managed.calls
        assert managed.pool.loss
    finally:
        pool.stop()
