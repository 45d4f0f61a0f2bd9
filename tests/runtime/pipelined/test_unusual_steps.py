"""Unusual training steps observe in workers what they observe in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import ModelJournal
from tests.programs.changing_steps import ODDER as ODD
from tests.programs.pipelined_runs import made, manage
from tests.programs.training_steps import Program

STEPS = 4
Pair = tuple[nn.Module, nn.Module, ModelJournal]


@pytest.fixture(scope="module")
def pair_of(pool: WorkerPool) -> Iterator[Callable[[Program], Pair]]:
    """One managed model for all programs with models of a kind: plans are made once."""
    pairs: dict[Any, Pair] = {}

    def find(program: Program) -> Pair:
        if program.make not in pairs:
            reference = made(program)
            model = copy.deepcopy(reference)
            pairs[program.make] = reference, model, manage(model, pool)
        return pairs[program.make]

    yield find
    pairs.clear()


def train(model: nn.Module, program: Program) -> list[Any]:
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    model.zero_grad()
    seen: list[Any] = []
    for step in range(STEPS):
        seen += program.step(model, optimizer, step)
    return [*seen, torch.get_rng_state()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ODD)
def test_sees_what_one_process_sees(name: str, pair_of: Callable[[Program], Pair]) -> None:
    program = ODD[name]
    reference, model, story = pair_of(program)
    model.load_state_dict(reference.state_dict())
    before = story.steps.get("overlapped", 0)
    expected, found = train(reference, program), train(model, program)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, equal_nan=True)
    for (key, one), other in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")
    if program.path == "overlapped":
        assert story.steps.get("overlapped", 0) >= before + STEPS - 2, str(story)
