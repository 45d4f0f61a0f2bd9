"""With the "always" filter, warnings of deferred ops are shown in every step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import manage


def test_as_often_as_the_op_is_called(pool: WorkerPool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    story = manage(model, pool)
    for _ in range(6):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            loss = F.mse_loss(model(torch.randn(8, 6)), torch.randn(1, 1))
        assert ["Using a target size" in str(one.message) for one in found] == [True]
        assert found[0].filename == __file__
        loss.backward()
    assert story.steps["overlapped"] == 4, str(story)


def test_one_that_is_an_error_is_raised(pool: WorkerPool) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    manage(model, pool)
    for step in range(5):
        with warnings.catch_warnings():
            warnings.simplefilter("error" if step == 4 else "ignore")
            output = model(torch.randn(8, 6))
            if step == 4:
                with pytest.raises(UserWarning, match="Using a target size"):
                    F.mse_loss(output, torch.randn(1, 1))
            else:
                F.mse_loss(output, torch.randn(1, 1)).backward()
