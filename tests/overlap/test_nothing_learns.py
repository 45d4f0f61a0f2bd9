"""A call in which nothing learns, and a loss with weights of its own: those get their gradients, as in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini import GeminiCompiler, GeminiConfig
from gemini.report.journal import OVERLAPPED, UNDIVIDED
from gemini.runtime.controller import dispatch


class Pair(nn.Module):
    """A generator and a discriminator; its call is the generator's alone."""

    def __init__(self, normalizes: bool) -> None:
        super().__init__()
        between = [nn.BatchNorm1d(16)] if normalizes else []
        self.generator = nn.Sequential(nn.Linear(6, 16), *between, nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise)

    def train_only(self, part: nn.Module) -> None:
        self.requires_grad_(requires_grad=False)
        part.requires_grad_()


def train(model: Pair) -> list[float]:
    makes = torch.optim.Adam(model.generator.parameters(), 0.01)
    judges = torch.optim.Adam(model.discriminator.parameters(), 0.01)
    generator, told = torch.Generator().manual_seed(0), []
    yes, no = torch.ones(8, 1), torch.zeros(8, 1)
    for _ in range(5):
        real, noise = torch.randn(8, 8, generator=generator), torch.randn(8, 6, generator=generator)
        model.train_only(model.generator)
        fooled = F.binary_cross_entropy_with_logits(model.discriminator(model(noise)), yes)
        makes.zero_grad()
        fooled.backward()
        makes.step()
        model.train_only(model.discriminator)
        known = F.binary_cross_entropy_with_logits(model.discriminator(real), yes)
        made = F.binary_cross_entropy_with_logits(model.discriminator(model(noise).detach()), no)
        judges.zero_grad()
        ((known + made) / 2).backward()
        told += [fooled.item(), *(parameter.grad.norm().item() for parameter in model.discriminator.parameters())]
        judges.step()
    return told


@pytest.mark.parametrize("path", [OVERLAPPED, UNDIVIDED])
def test_weights_of_the_loss_learn(tmp_path, path):
    torch.manual_seed(0)
    model = Pair(normalizes=path == UNDIVIDED)
    expected = train(copy.deepcopy(model))
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(tmp_path))
    found = train(GeminiCompiler().compiler(model, config))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    managed = dispatch.find(model)
    assert managed is not None
    assert managed.overlap is not None
    assert managed.overlap.story.steps[path] >= 6
