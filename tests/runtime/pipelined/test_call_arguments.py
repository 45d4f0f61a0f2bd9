"""Non-tensor arguments are used and mutated once per call, as in one process."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.runtime.call_outcome import CallPath
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import manage

STEPS = 5


class Given(nn.Module):
    """Does something with its second argument."""

    def __init__(self, use: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__()
        self.use, self.one, self.two = use, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, more: Any) -> torch.Tensor:
        return self.two(self.use(torch.tanh(self.one(x)), more))


def _count(h: torch.Tensor, more: Any) -> torch.Tensor:
    more["calls"] += 1
    return h


def _append(h: torch.Tensor, more: Any) -> torch.Tensor:
    more.append(1)
    return h


def _call(h: torch.Tensor, more: Any) -> torch.Tensor:
    more(len(h))
    return h


def _draw(h: torch.Tensor, more: Any) -> torch.Tensor:
    return h + torch.rand(h.shape, generator=more, dtype=h.dtype)


def _read(h: torch.Tensor, more: Any) -> torch.Tensor:
    return h * float(more[1000])


def _table(step: int) -> Any:
    """NumPy prints all of them alike."""
    made = np.ones(2000)
    made[1000] += step // 3
    return made


CASES: dict[str, tuple[Any, Callable[[], Callable[[int], Any]]]] = {
    "counted from a default": (_count, lambda: _same(defaultdict(int))),
    "a new list": (_append, lambda: lambda _: []),
    "a deque": (_append, lambda: lambda _: deque()),
    "a function": (_call, lambda: _same([].append)),
    "a generator": (_draw, lambda: _same(torch.Generator().manual_seed(1))),
    "a large array": (_read, lambda: _table),
}


def _same(value: Any) -> Callable[[int], Any]:
    return lambda _: value


def _train(model: nn.Module, make: Callable[[int], Any]) -> tuple[list[float], list[str]]:
    generator = torch.Generator().manual_seed(2)
    optimizer, told, seen = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    for step in range(STEPS):
        x, more = torch.randn(4, 6, generator=generator, dtype=torch.float64), make(step)
        loss = F.cross_entropy(model(x, more), torch.randint(3, (4,), generator=generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(loss.item())
        held = getattr(more, "__self__", more)
        seen.append(str(held.get_state() if isinstance(held, torch.Generator) else held))
    return told, seen


@pytest.mark.parametrize("name", CASES)
def test_arguments_are_changed_once_a_call(name: str, pool: WorkerPool) -> None:
    use, make = CASES[name]
    torch.manual_seed(0)
    model = Given(use).double()
    expected, changed = _train(copy.deepcopy(model), make())
    manage(model, pool)
    told, found = _train(model, make())
    assert told == pytest.approx(expected, rel=1e-12)
    assert found == changed


def test_outputs_are_laid_out_as_inputs_are(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Conv2d(2, 2, 3, padding=1) for _ in range(3)]).double()
    alone = copy.deepcopy(model)
    story = manage(model, pool)
    for step in range(9):
        x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
        x = x.to(memory_format=torch.channels_last) if step % 2 else x
        y = model(x)
        assert y.stride() == alone(x).stride()
        y.mean().backward()
    assert story.steps[CallPath.OVERLAPPED] >= 4


def test_a_tensor_of_a_class_of_its_own_makes_one(pool: WorkerPool) -> None:
    class Own(torch.Tensor):
        """As those of torchvision."""

    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])
    manage(model, pool, strict=False)
    for _ in range(4):
        y = model(torch.randn(4, 3).as_subclass(Own))
        y.mean().backward()
        assert type(y) is Own
