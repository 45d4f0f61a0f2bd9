"""Workers that share a GPU train by schedules as one process does. Needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemini import GeminiCompiler, GeminiConfig
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.interception import dispatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
STEPS = 8


class Net(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(512, 128)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True) for _ in range(6)
        )
        self.head = nn.Linear(128, 512)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _trained(config: GeminiConfig | None) -> tuple[list[float], nn.Module, Any]:
    torch.manual_seed(3)
    model = Net().cuda()
    if config is not None:
        GeminiCompiler().compiler(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(512, (16, 33), device="cuda")
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, dispatch.find_managed(model)


@pytest.mark.parametrize("schedule", ["1f1b", "composed", "auto"])
def test_workers_that_share_a_gpu(schedule: str, tmp_path: Path) -> None:
    mapping = {f"stage_{at}": {"shard_0": "cuda:0"} for at in range(2)}
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=4, schedule=schedule, device_mapping=mapping, trace=True,
        run_folder=str(tmp_path), quiet=True,
    )  # fmt: skip
    expected, reference, _ = _trained(None)
    found, model, managed = _trained(config)
    assert found == pytest.approx(expected, rel=1e-4)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert managed.pipelined.journal.steps.get(CallPath.OVERLAPPED, 0) >= STEPS - 3
    kinds = {path.suffix for path in tmp_path.rglob("step*")}
    assert {".json", ".png"} <= kinds
