"""Memoized user functions work in workers, and none draws memoized random numbers again."""

from __future__ import annotations

import fnmatch
import functools
from typing import Any

import torch
from torch import nn

from gemini.capture.memoized import find_caches, uses_rng
from gemini.guards.reached_values import ReachedValues
from gemini.runtime.transport.serialization import ClassTable, pack, unpack


@functools.lru_cache(maxsize=3)
def table(size: int, *, scale: float = 1.0) -> torch.Tensor:
    return torch.arange(size) * scale


@functools.cache
def noise(size: int, *, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(size) * scale


@functools.lru_cache
def several(size: int, kind: str) -> dict[str, torch.Tensor]:
    return {kind: torch.randn(size)}


@functools.cache
def falling(count: int) -> tuple[int, ...]:
    return (count, *falling(count - 1)) if count else ()


class Reads(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + table(self.out_features, scale=0.5) + len(falling(3))


class Draws(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + noise(self.out_features, scale=2.0)


class DrawsByMethod(nn.Linear):
    @functools.lru_cache  # noqa: B019
    def mask(self, size: int) -> torch.Tensor:
        return torch.rand(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.mask(self.out_features)


def sent(value: Any) -> Any:
    here, there = ClassTable(), ClassTable(1)
    body, tensors = pack(value, here)
    there.add_announced(here.unannounced())
    return unpack(body, tensors, there)


def test_it_travels_as_its_function() -> None:
    found = sent({"of": table, "again": falling})
    assert found["of"] is not table
    assert found["of"].cache_parameters() == table.cache_parameters()
    assert torch.equal(found["of"](3), table(3))
    assert found["again"](2) == (2, 1)


def test_one_of_an_installed_package_travels_by_name() -> None:
    assert sent({"of": fnmatch._compile_pattern})["of"] is fnmatch._compile_pattern


def test_one_that_draws_is_not_emptied_and_keeps_its_caller_at_home() -> None:
    for model in (Draws(4, 4), DrawsByMethod(4, 4)):
        outside, x = ReachedValues(), torch.randn(2, 4)
        assert not outside.check(model)  # nobody has asked it yet
        before = model(x)
        state = torch.get_rng_state()
        assert "caches random numbers" in outside.check(model)
        assert not any(uses_rng(cache) for cache in find_caches(model))
        assert torch.equal(state, torch.get_rng_state())
        assert torch.equal(before, model(x))


def test_it_may_return_dictionaries() -> None:
    several(2, "first")
    several(3, "second")
    assert uses_rng(several)


def test_one_that_does_not_draw_is_in_nobodys_way() -> None:
    model = Reads(4, 4)
    model(torch.randn(2, 4))
    assert not ReachedValues().check(model)
    assert table in find_caches(model)
    assert not uses_rng(table)
