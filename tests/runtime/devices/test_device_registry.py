"""Any device behind the interface trains as the CPU does, and workers get the configured devices."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from conformance.zoo.classics import CLASSICS
from gemini import GeminiConfig
from gemini.errors import ConfigError
from gemini.runtime.devices import registry
from gemini.runtime.devices.worker_devices import assign_devices
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.memory.optimizer_state import move_optimizer_state
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.runtime.devices import mirror
from tests.training import largest_difference, state_difference, train

registry.register("mirror", "tests.runtime.devices.mirror:Mirror")


class Drawing(nn.Module):
    """Uses the mirror's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (1 + mirror.draw() / 100)


def drawing() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Drawing() for _ in range(4)])


@pytest.fixture(scope="module")
def mirrors() -> Iterator[WorkerPool]:
    pool = WorkerPool(2, 1, devices=["mirror:0", "mirror:0"])
    yield pool
    pool.stop()


def managed(model: nn.Module, pool: WorkerPool) -> ManagedModel:
    found = ManagedModel(model, pool, quiet=True)
    dispatch.manage(model, found)
    return found


@pytest.mark.parametrize("name", [name for name in sorted(CLASSICS) if "norm" in name or "attention" in name][:6])
def test_a_device_behind_the_interface_trains_as_the_cpu(name: str, mirrors: WorkerPool) -> None:
    reference, args, kwargs = CLASSICS[name]()
    expected = train(reference, args, kwargs)
    model, args, kwargs = CLASSICS[name]()
    before = mirror.done.copy()
    found = managed(model, mirrors)
    assert largest_difference(expected, train(model, args, kwargs)) <= 1e-5
    assert state_difference(reference, model) <= 1e-5
    if found.calls:
        assert mirror.done["allocate"] > before["allocate"]
        assert mirror.done["finish"] - before["finish"] >= found.calls


def test_the_generator_of_a_device_travels(mirrors: WorkerPool) -> None:
    x = torch.randn(4, 8)
    mirror.Mirror.generator = b"1"
    reference = drawing()
    expected = train(reference, (x,), {})
    ended = mirror.Mirror.generator
    mirror.Mirror.generator = b"1"
    model = drawing()
    found = managed(model, mirrors)
    assert largest_difference(expected, train(model, (x,), {})) == 0.0
    assert mirror.Mirror.generator == ended
    assert found.calls


def test_workers_of_several_devices_each_have_their_own_tensors() -> None:
    pool = WorkerPool(3, 1, devices=["cpu", "mirror:0", "mirror:1"])
    try:
        layer = nn.Linear(8, 8)
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)], layer)
        reference = copy.deepcopy(model)
        x = torch.randn(4, 8)
        expected = train(reference, (x,), {})
        found = managed(model, pool)
        assert largest_difference(expected, train(model, (x,), {})) == 0.0
        assert state_difference(reference, model) == 0.0
        used = {unit.worker.device.name for unit in found.remote_modules.values()}
        assert used == {"cpu", "mirror:0", "mirror:1"}
        assert set(found.shared_parameters.devices.values()) == used
    finally:
        pool.stop()


def test_a_weight_of_two_devices_stays_with_the_first() -> None:
    pool = WorkerPool(2, 1, devices=["cpu", "mirror:0"])
    try:
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        model[3].weight = model[0].weight
        reference = copy.deepcopy(model)
        x = torch.randn(4, 8)
        expected = train(reference, (x,), {})
        found = managed(model, pool)
        assert largest_difference(expected, train(model, (x,), {})) == 0.0
        assert any("shares a tensor with a module on cpu" in reason for reason in found.refused.values())
    finally:
        pool.stop()


def test_what_optimizers_remember_follows() -> None:
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    parameter.grad = torch.empty(3, device="meta")
    optimizer = torch.optim.Adam([parameter])
    optimizer.step()
    optimizer.state[parameter]["exp_avg"] = torch.zeros(3)  # as if the parameter had moved
    move_optimizer_state([parameter])
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].device == parameter.device


# ── configuration ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_workers_get_the_devices_of_the_mapping() -> None:
    mapping = {"stage_0": {"shard_0": "mirror:1"}, "stage_1": {"shard_0": "cpu"}}
    assert assign_devices(nn.Linear(2, 2), GeminiConfig(device_mapping=mapping), 2) == ["mirror:1", "cpu"]
    assert assign_devices(nn.Linear(2, 2), GeminiConfig(pipeline_degree=3), 3) == ["cpu"] * 3
    assert assign_devices(nn.Linear(2, 2, device="meta"), GeminiConfig(pipeline_degree=2), 2) == ["cpu"] * 2


def test_all_devices_that_are_not_there_are_named() -> None:
    mapping = {"stage_0": {"shard_0": "mirror:7"}, "stage_1": {"shard_0": "mirror:8"}}
    with pytest.raises(ConfigError, match=r"(?s)mirror:7.*there are 2 mirrors.*mirror:8"):
        assign_devices(nn.Linear(2, 2), GeminiConfig(device_mapping=mapping), 2)
    with pytest.raises(ConfigError, match=r"'abacus:0' is of no known kind(?s:.*)use one of cpu, cuda"):
        registry.create_device("abacus:0")
