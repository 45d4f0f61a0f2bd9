"""Module placement balances work over contiguous runs and is deterministic."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from gemini.guards.active_modes import active_mode
from gemini.runtime.eager.first_call_trace import FirstCallTrace, ModuleTrace
from gemini.runtime.eager.module_placement import distribute, place_modules

WORK = st.lists(st.integers(0, 1000), min_size=1, max_size=30)


def seen(work: list[int]) -> list[ModuleTrace]:
    return [ModuleTrace(nn.Linear(1, 1), order, work=float(amount)) for order, amount in enumerate(work)]


@given(WORK, st.integers(1, 6))
def test_neighbours_stay_together_and_no_worker_is_idle(work: list[int], workers: int) -> None:
    dealt = distribute(seen(work), workers)
    places = [place for _, place in dealt]
    assert [one.order for one, _ in dealt] == list(range(len(work)))
    assert places == sorted(places)
    assert set(places) == set(range(min(workers, len(work))))


@given(WORK, st.integers(1, 6))
def test_the_largest_load_is_within_one_unit_of_the_average(work: list[int], workers: int) -> None:
    loads = [0.0] * workers
    for one, place in distribute(seen(work), workers):
        loads[place] += one.work
    assert max(loads) <= sum(work) / workers + max(work) + 1e-6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


def observed(model: nn.Module, x: torch.Tensor) -> FirstCallTrace:
    """As the dispatcher watches: every call of a module goes through the observation."""
    observation = FirstCallTrace(model)
    original = nn.Module.__call__
    nn.Module.__call__ = lambda module, *a, **k: observation.call(module, lambda: original(module, *a, **k))
    try:
        observation.run(lambda: original(model, x))
    finally:
        nn.Module.__call__ = original
    return observation


def names(model: nn.Module, x: torch.Tensor, workers: int) -> list[tuple[str, int]]:
    known = {id(module): name for name, module in model.named_modules()}
    return [(known[id(one.module)], place) for one, place in place_modules(observed(model, x).root, workers)]


@given(st.integers(2, 9), st.integers(2, 4))
def test_a_model_gets_the_same_units_every_time(blocks: int, workers: int) -> None:
    model = nn.Sequential(*(Block(8) for _ in range(blocks)))
    x = torch.randn(4, 8)
    first = names(model, x, workers)
    assert first == names(model, x, workers)
    assert {place for _, place in first} == set(range(workers)) or len(first) < workers


def test_equal_blocks_are_not_taken_apart() -> None:
    model = nn.Sequential(*(Block(8) for _ in range(4)))
    assert names(model, torch.randn(4, 8), 2) == [("0", 0), ("1", 0), ("2", 1), ("3", 1)]


def test_one_large_part_is_taken_apart() -> None:
    model = nn.Sequential(nn.Sequential(*(Block(8) for _ in range(4))))
    assert names(model, torch.randn(4, 8), 2) == [("0.0", 0), ("0.1", 0), ("0.2", 1), ("0.3", 1)]


def test_who_watches_ops_is_noticed() -> None:
    assert not active_mode()
    with torch.device("cpu"):
        assert not active_mode()
    with torch.device("meta"):
        assert active_mode()
    with torch.autograd.forward_ad.dual_level():
        assert active_mode()
    with saved_tensors_hooks(lambda saved: saved.half(), lambda packed: packed.float()):
        assert active_mode()
    with save_on_cpu():  # the values are the same
        assert not active_mode()
    assert torch.func.vmap(lambda x: x + bool(active_mode()))(torch.zeros(2)).tolist() == [1, 1]
    assert not active_mode()
