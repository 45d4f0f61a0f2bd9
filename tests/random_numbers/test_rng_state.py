"""The cached generator state always equals the state that torch returns."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.random_numbers.rng_state import CpuGenerator, get_state, set_state

DRAWS = {
    "uniform": lambda: torch.rand(1),
    "normal": lambda: torch.empty(1).normal_(),  # makes a pair, and keeps the second
    "double": lambda: torch.empty(1, dtype=torch.float64).normal_(),
    "many": lambda: torch.randn(700),
    "whole": lambda: torch.empty(624, dtype=torch.int32).random_(),  # one round of all words
    "permutation": lambda: torch.randperm(9),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(5)),
    "seed": lambda: torch.manual_seed(3),
    "nothing": lambda: torch.ones(2),
}


def told() -> bytes:
    return bytes(torch.get_rng_state().numpy())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=12), st.integers(0, 11))
def test_the_state_is_what_torch_tells_after_any_draws_and_comes_back(names: list[str], at: int) -> None:
    with torch.random.fork_rng(devices=[]):
        kept = get_state()
        for place, name in enumerate(names):
            DRAWS[name]()
            assert get_state() == told()
            if place == at:
                kept = get_state()
        set_state(kept)
        assert get_state() == kept == told()
        before = torch.randn(3)
        set_state(kept)
        assert torch.equal(torch.randn(3), before)


def test_an_unchanged_state_is_the_same_object_and_other_memory_is_asked_for() -> None:
    assert get_state() is get_state()
    other = CpuGenerator(torch.Generator())
    other.address = 0
    for _ in range(2):
        assert other.state() == bytes(other.generator.get_state().numpy())
        other.generator.manual_seed(5)
