"""The speedup bound of workers is computed without a plan and without side effects."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gemini.launcher.speedup_bound import shortest_step_ms


class Odd(nn.Module):
    """Counts its calls, draws, writes a buffer and its input, and notes how many threads it had."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        THREADS.append(torch.get_num_threads())
        return nn.functional.dropout(self.norm(self.layer(x.add_(1))))


THREADS: list[int] = []


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    THREADS.clear()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_forward_on_the_threads_of_a_worker_leaves_everything_as_it_was() -> None:
    model, x = Odd(), torch.zeros(8, 4)
    hooked: list[int] = []
    model.register_forward_hook(lambda *_: hooked.append(1))
    state = {name: one.clone() for name, one in model.state_dict().items()}
    generator = torch.get_rng_state()
    found = shortest_step_ms(model, (x,), {}, 100.0, 2)
    assert found >= 52.5
    assert THREADS == [2, 1, 2]
    assert torch.get_num_threads() == 2
    assert model.calls == 0
    assert hooked == []
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not x.any()


@pytest.mark.usefixtures("two_threads")
def test_what_the_model_raises_is_raised_and_threads_are_put_back() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        shortest_step_ms(Odd(), (torch.zeros(8, 5),), {}, 100.0, 2)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_nothing_runs_where_this_process_has_no_more_threads_than_a_worker() -> None:
    torch.set_num_threads(1)
    assert shortest_step_ms(Odd(), (torch.zeros(8, 4),), {}, 100.0, 2) == 52.5
    assert THREADS == []


def test_other_devices_are_not_judged_by_threads() -> None:
    assert shortest_step_ms(Odd().to("meta"), (), {}, 100.0, 2) == 0.0
