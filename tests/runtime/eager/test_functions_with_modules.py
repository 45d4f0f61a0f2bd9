"""Functions that hold modules run in a worker with the weights and mode of those modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.wrapped_models import Wrap, check, step, weights


class Block(nn.Module):
    """Its perceptron is called by a function that was made with it, as in minGPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"fc": nn.Linear(width, 2 * width), "dropout": nn.Dropout(0.3)})
        self.back = nn.Linear(2 * width, width)
        m = self.mlp
        self.through = lambda x: m.dropout(torch.relu(m.fc(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(self.through(self.norm(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained_and_evaluated(wrap: Wrap) -> Any:
    """Modules go to workers in evaluation mode, and are trained afterwards."""
    model = wrap(Blocks()).eval()
    x = torch.randn(12, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with torch.no_grad():
        seen = [model(x) for _ in range(3)]
    model.train()
    losses = [step(model, optimizer) for _ in range(3)]
    return seen, losses, weights(model), model.eval()(x)


def test_a_function_made_with_parts_of_a_module_has_their_weights_and_mode(pool: WorkerPool) -> None:
    check(trained_and_evaluated, pool, elsewhere=True)


class Around(nn.Module):
    """A residual connection around whatever it is given, as in the Annotated Transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, inner: Any) -> torch.Tensor:
        return x + self.lin(inner(self.norm(x)))


class Keeping(nn.Module):
    """Keeps a part of its graph in an attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin, self.kept = nn.Linear(width, width), None

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.kept = (self.lin(x) * mask).softmax(-1)
        return self.kept @ x.t() @ x


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.around, self.attention = Around(width), Keeping(width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.around(x, lambda y: self.attention(y, mask))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer(16) for _ in range(3)), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def given_functions(wrap: Wrap) -> Any:
    model = wrap(Layers())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return [step(model, optimizer) for _ in range(4)], weights(model)


def test_a_module_that_is_given_a_function_with_parts_runs_it_on_them(pool: WorkerPool) -> None:
    check(given_functions, pool, elsewhere=True)
