"""Planned steps draw the random numbers of one process on any device and advance its generators equally."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini import GeminiCompiler, GeminiConfig
from gemini.random_numbers.rng_state import get_state
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.interception import dispatch
from gemini.runtime.pipelined.step_generators import apply_rng_state, rng_states_for
from tests.runtime.devices.mirror import Mirror

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def plan(*draws: tuple[str, ...], is_random: bool = True) -> Any:
    return SimpleNamespace(uses_torch_rng=is_random, rng_patterns=draws, nworkers=2)


@pytest.fixture
def managed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Mirror, "generator", b"41")
    workers = [SimpleNamespace(device=Mirror("mirror:0")) for _ in range(2)]
    return SimpleNamespace(
        pool=SimpleNamespace(workers=workers), shared_parameters=SimpleNamespace(model_device=torch.device("cpu"))
    )


def test_the_state_is_that_of_the_device_too(managed: Any) -> None:
    assert rng_states_for(plan(("draw",)), managed) == get_state() + b"41"


def test_the_program_follows_both_generators(managed: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        ahead = bytes(torch.Generator().manual_seed(9).get_state().numpy())
        apply_rng_state(plan(("draw",)), managed, ahead + b"77")
        assert get_state() == ahead
    assert Mirror.generator == b"77"


def test_without_draws_nothing_moves(managed: Any) -> None:
    before = get_state()
    assert rng_states_for(plan((), is_random=False), managed) == b""
    apply_rng_state(plan(()), managed, b"")
    assert get_state() == before
    assert Mirror.generator == b"41"


def test_workers_that_draw_their_own_have_other_states(managed: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        one, two = rng_states_for(plan((), ()), managed)
    assert one != two


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(64, 64), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.linear(x)))


def _trained(config: GeminiConfig | None) -> tuple[list[float], torch.Tensor, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(*[Layer() for _ in range(6)]).cuda()
    if config is not None:
        GeminiCompiler().compiler(model, config)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for _ in range(8):
        x = torch.randn(16, 64, device="cuda")
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cuda.get_rng_state(), dispatch.find_managed(model)


@needs_gpu
@pytest.mark.parametrize("rng", ["exact", "fast"])
def test_dropout_on_a_gpu(rng: str) -> None:
    mapping = {f"stage_{at}": {"shard_0": "cuda:0"} for at in range(2)}
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=4, rng=rng, device_mapping=mapping, quiet=True
    )
    expected, state, _ = _trained(None)
    found, ended, managed = _trained(config)
    if rng == "exact":
        assert found == pytest.approx(expected, rel=1e-5)
        assert torch.equal(state, ended)
    else:
        assert managed.pipelined.journal.steps.get(CallPath.OVERLAPPED)
        assert found != expected
