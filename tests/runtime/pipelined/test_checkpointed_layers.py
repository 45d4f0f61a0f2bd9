"""Checkpointed layers and normalized weights run in the stages: the numbers of one device, overlapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import weight_norm
from torch.utils.checkpoint import checkpoint

from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.pipelined_runs import manage

STEPS = 4


class Layers(nn.Module):
    """Layers with dropout; those in the middle are checkpointed, the first has a normalized weight."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.first, self.last = reentrant, weight_norm(nn.Linear(6, 16)), nn.Linear(16, 4)
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
        self.conv = weight_norm(nn.Conv1d(16, 16, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.inner:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(self.conv(x[..., None])[..., 0])


def transformer(reentrant: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 24}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, attention_dropout=0.1, use_cache=False, **sizes))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    if isinstance(model, Layers):
        x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))
        return F.cross_entropy(model(x), y)
    ids = torch.randint(24, (8, 5))
    return model(input_ids=ids, labels=ids).loss


def train(model: nn.Module) -> Iterator[Any]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        if isinstance(model, Layers):
            yield model.first.weight.detach().clone()
        optimizer.step()
        yield loss.item()
    yield from model.state_dict().values()
    yield torch.get_rng_state()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize(
    ("make", "reentrant"),
    [(transformer, True)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in ((transformer, False), (Layers, True), (Layers, False))],
)
def test_equal_to_one_device(make: Callable[[bool], nn.Module], reentrant: bool, pool: WorkerPool) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(make(reentrant).double())
    expected = [*train(models[0])]
    journal = manage(models[1], pool)
    for one, other in zip(train(models[1]), expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-6, atol=1e-7)
    assert journal.steps.get("overlapped") == STEPS - 2, journal.reasons
