"""Workers that share a GPU train as one process does on it. Needs a GPU."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.training import largest_difference, state_difference, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if scale > 1e30:
            return x + torch.empty(1 << 38, device=x.device).sum()
        return x + self.drop(torch.tanh(self.norm(self.linear(x)))) * scale


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale)
        return x


@pytest.fixture(scope="module")
def gpu() -> Iterator[WorkerPool]:
    pool = WorkerPool(2, 1, devices=["cuda:0", "cuda:0"])
    yield pool
    pool.stop()


def managed(model: nn.Module, pool: WorkerPool) -> ManagedModel:
    found = ManagedModel(model, pool, quiet=True)
    dispatch.manage(model, found)
    return found


def test_trains_as_one_process(gpu: WorkerPool) -> None:
    x = torch.randn(32, 64, device="cuda")
    reference, model = Stack().cuda(), Stack().cuda()
    expected = train(reference, (x,), {})
    ended = torch.cuda.get_rng_state()
    found = managed(model, gpu)
    assert largest_difference(expected, train(model, (x,), {})) == 0.0
    assert state_difference(reference, model) == 0.0
    assert torch.equal(ended, torch.cuda.get_rng_state())
    assert found.calls
    assert not found.refused


def test_autocast_and_a_scaler(gpu: WorkerPool) -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(7)
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda")
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = model(torch.randn(32, 64, device="cuda")).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach().clone() for p in model.parameters()]

    expected = run(Stack().cuda())
    model = Stack().cuda()
    managed(model, gpu)
    assert all(torch.equal(a, b) for a, b in zip(expected, run(model), strict=True))


def test_a_program_on_the_cpu_may_have_workers_on_a_gpu(gpu: WorkerPool) -> None:
    x = torch.randn(32, 64)
    reference = Stack()
    for module in reference.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = copy.deepcopy(reference)
    expected = train(reference, (x,), {})
    found = managed(model, gpu)
    result = train(model, (x,), {})
    assert found.calls
    assert {p.device.type for p in model.layers.parameters()} == {"cuda"}
    for (loss, _), (loss2, _) in zip(expected, result, strict=True):
        assert abs(float(loss) - float(loss2)) < 1e-4
    assert model(x).device.type == "cpu"


def test_out_of_memory_is_said_as_such(gpu: WorkerPool) -> None:
    model, x = Stack().cuda(), torch.randn(32, 64, device="cuda")
    managed(model, gpu)
    for _ in range(2):
        model(x).sum().backward()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(x, 1e31)
    assert "in worker" in str(caught.value.__notes__)
    model(x).sum().backward()


def test_memory_comes_back() -> None:
    def used() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def once() -> None:
        pool = WorkerPool(2, 1, devices=["cuda:0", "cuda:0"])
        model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]).cuda()
        managed(model, pool)
        train(model, (torch.randn(64, 2048, device="cuda"),), {})
        pool.stop()

    once()
    before = used()
    once()
    assert used() - before < 32 << 20
