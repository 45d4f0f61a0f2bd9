"""Stages with activation recomputation give the numbers of one process in less memory."""

from __future__ import annotations

import copy

import torch
from torch import nn

from gemini import GeminiCompiler, GeminiConfig
from gemini.runtime.interception import dispatch

SAMPLES, WIDTH, PIECES = 4096, 64, 8


def net() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Tanh()) for _ in range(12)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 2))


def train(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    seen = []
    for _ in range(5):
        model.zero_grad()
        loss = model(torch.randn(SAMPLES, WIDTH)).square().mean()
        loss.backward()
        seen += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    return [*seen, torch.rand(3)]


def test_trains_within_a_limit() -> None:
    reference = net()
    expected = train(reference)
    needs = []
    for limit in (None, 0.85):
        model = copy.deepcopy(reference)
        model.zero_grad()
        memory = None if limit is None else int(limit * needs[0] * 2**20)
        config = GeminiConfig(
            mode="pipeline", pipeline_degree=2, accum_degree=PIECES, schedule="gpipe", memory_limit=memory, quiet=True
        )
        GeminiCompiler().compiler(model, config)
        managed = dispatch.find_managed(model)
        assert managed is not None
        assert managed.pipelined is not None
        try:
            found = train(model)
        finally:
            managed.pool.stop()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        story = managed.pipelined.journal
        assert story.steps["overlapped"] == 3, str(story)
        assert ("recomputed" in story.plan) is (limit is not None), str(story)
        ((kind,),) = managed.pipelined.plans.kinds.values()
        assert kind.plan is not None
        needs.append(max(worker.memory.total_mb for worker in kind.plan.analysis.workers))
    assert needs[1] <= 0.85 * needs[0]
