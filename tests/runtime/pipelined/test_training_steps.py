"""Training steps run in workers as in one process: losses, observed values, weights, generator state."""

from __future__ import annotations

import copy

import pytest
import torch

from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import STEPS, made, manage, train
from tests.programs.training_steps import PROGRAMS


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_trains_as_one_process(name: str, pool: WorkerPool) -> None:
    program = PROGRAMS[name]
    reference = made(program)
    model = copy.deepcopy(reference)
    expected = train(reference, program)
    story = manage(model, pool)
    found = train(model, program)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    for (key, one), other in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}")
    assert not any("InternalFault" in reason for reason in story.reasons), str(story)
    if program.path:
        assert story.steps.get(program.path, 0) >= STEPS - 2, str(story)
    if program.path == "undivided":
        assert "overlapped" not in story.steps, str(story)
