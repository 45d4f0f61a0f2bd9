"""Branches on masks that are computed from sizes do not prevent pipelining."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from gemini.runtime.call_outcome import CallPath
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.models import CLASSES
from tests.programs.pipelined_runs import manage


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ x.transpose(1, 2)
        if mask.any().item():
            scores = scores.masked_fill(mask, -torch.inf)
        return x + scores.softmax(-1) @ self.value(x)


class Causal(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, width), nn.Linear(width, CLASSES)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        mask = torch.triu(x.new_ones(tokens.shape[1], tokens.shape[1]), diagonal=1).bool()
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x[:, -1])


def train(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(0)
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), []
    for length in (6, 6, 6, 6, 1, 1, 1, 1, 6):  # of one word, nothing is masked
        tokens, labels = torch.randint(20, (8, length)), torch.randint(CLASSES, (8,))
        loss = F.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    return [*seen, *(value.clone() for value in model.state_dict().values())]


def test_a_branch_on_a_mask_of_sizes_is_no_branch_on_samples(pool: WorkerPool) -> None:
    torch.manual_seed(1)
    model = Causal().double()
    expected = train(copy.deepcopy(model))
    story = manage(model, pool)
    for one, other in zip(train(model), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 5, str(story)
