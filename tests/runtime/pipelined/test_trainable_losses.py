"""Trainable weights of a loss receive gradients where the model itself has none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini import GeminiCompiler, GeminiConfig
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.interception import dispatch


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


@pytest.mark.parametrize("path", [CallPath.OVERLAPPED, CallPath.SINGLE_MICROBATCH])
def test_weights_of_the_loss_learn(tmp_path, path):
    torch.manual_seed(0)
    model = Pair(normalizes=path == CallPath.SINGLE_MICROBATCH)
    expected = train(copy.deepcopy(model))
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(tmp_path))
    found = train(GeminiCompiler().compiler(model, config))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    managed = dispatch.find_managed(model)
    assert managed is not None
    assert managed.pipelined is not None
    assert managed.pipelined.journal.steps[path] >= 6


class Half(nn.Module):
    """Its last stages are frozen, and see nothing of what the first learn; its head is the program's to call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        self.frozen = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)])
        self.frozen.requires_grad_(requires_grad=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        learned = self.body(x)
        return learned, self.frozen(learned.detach())


def train_half(model: Half, reads_both: bool) -> list[float]:
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], 0.01)
    generator, told = torch.Generator().manual_seed(0), []
    for _ in range(5):
        x, y = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
        learned, fixed = model(x)
        loss = F.cross_entropy(model.head(fixed), y) + (learned.pow(2).mean() if reads_both else 0)
        optimizer.zero_grad()
        loss.backward()
        told += [loss.item(), *(0 if one.grad is None else one.grad.norm().item() for one in model.parameters())]
        optimizer.step()
    return told


@pytest.mark.parametrize("reads_both", [False, True])
def test_a_loss_may_follow_a_stage_without_a_backward(tmp_path, reads_both):
    torch.manual_seed(0)
    model = Half()
    expected = train_half(copy.deepcopy(model), reads_both)
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=2, quiet=True, run_folder=str(tmp_path), strict=True
    )
    found = train_half(GeminiCompiler().compiler(model, config), reads_both)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    managed = dispatch.find_managed(model)
    assert managed is not None
    assert managed.pipelined is not None
    assert managed.pipelined.journal.steps[CallPath.OVERLAPPED] >= 3
