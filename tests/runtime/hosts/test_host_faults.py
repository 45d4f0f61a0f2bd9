"""Faults between hosts are reported within seconds, with a remedy, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from gemini import GeminiConfig
from gemini.config.host_address import worker_at
from gemini.errors import ConfigError, WorkerError
from gemini.runtime.devices.worker_devices import assign_devices
from gemini.runtime.hosts import code_versions, host_agent, host_supervisor
from gemini.runtime.hosts.ray_cluster import RayCluster
from gemini.runtime.hosts.travelling_code import copy_code
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool import remote_worker
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.runtime.hosts.local_host import CPU, ROOT, children, loopback_pool

pytestmark = pytest.mark.usefixtures("trusted_tests")


class Layer(nn.Module):
    """Counts its calls, and raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, deed: str = "") -> torch.Tensor:
        self.count += 1
        if deed == "raise":
            raise ValueError(f"an entry of {x[0, 0].item():.0f}")
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])

    def forward(self, x: torch.Tensor, deed: str = "") -> torch.Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(x, deed if at == 3 else "")
        return x


def managed(pool: WorkerPool) -> Model:
    torch.manual_seed(0)
    model = Model()
    known = ManagedModel(model, pool, quiet=True)
    dispatch.manage(model, known)
    for _ in range(2):
        model(torch.ones(2, 8))
    assert not known.refused, known.refused
    assert known.remote_modules
    return model


@pytest.fixture
def short() -> Iterator[WorkerPool]:
    made = loopback_pool([CPU], 3.0)
    yield made
    made.stop()


# ── starting ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_other_versions_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = code_versions.versions() | {"torch": "1.0"}
    monkeypatch.setattr(remote_worker, "versions", lambda: mine)
    with pytest.raises(ConfigError, match=r"torch 1.0 \(this host\) and 2.* \(host 127.0.0.1\)"):
        loopback_pool([CPU])


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="device 'cuda:7' of 127"):
        loopback_pool(["127.0.0.1/cuda:7"])


def test_no_token_no_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="there is no token for the Ray cluster"):
        RayCluster("127.0.0.1:6399")


@pytest.mark.parametrize("is_released", [True, False])
def test_the_silence_of_a_controller_counts_until_it_releases_the_worker(
    is_released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_supervisor, "SILENCE", 0.1)
    monkeypatch.setattr(host_supervisor, "PING", 0.1)
    silent = threading.Event()
    supervisor = host_supervisor.HostSupervisor("127.0.0.1", silent.set)
    if is_released:
        supervisor.answer("kill")
    assert silent.wait(2.0) is not is_released


def test_code_that_is_too_much_does_not_travel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "package").mkdir(parents=True)
    (source / ".hidden").mkdir()
    (source / "package" / "a.py").write_text("x = 1\n")
    (source / ".hidden" / "b.py").write_text("x = 1\n")
    (source / "data.bin").write_bytes(bytes(10))
    assert copy_code(source, tmp_path / "target") == 1
    assert [one.name for one in (tmp_path / "target").rglob("*") if one.is_file()] == ["a.py"]
    (source / "big.py").write_bytes(b"#" * (65 << 20))
    with pytest.raises(ConfigError, match="cannot travel to other hosts"):
        copy_code(source, tmp_path / "other")


@pytest.mark.parametrize("name", ["node2:9000/cpu", "node2/", "/cpu", "a b/cpu", "node2", "n/CPU"])
def test_a_mapping_is_checked(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a device"):
        GeminiConfig(device_mapping={"stage_0": {"shard_0": name}})


@pytest.mark.parametrize("name", ["node2/cpu", "10.0.0.2/cuda:3", "[fd00::2]/cpu", "a-b.c/xpu"])
def test_addresses_round_trip(name: str) -> None:
    assert str(worker_at(name)) == name
    GeminiConfig(device_mapping={"stage_0": {"shard_0": name}})


def test_the_model_must_be_on_such_a_device() -> None:
    config = GeminiConfig(device_mapping={"stage_0": {"shard_0": "node2/cuda:0"}, "stage_1": {"shard_0": "cpu"}})
    with pytest.raises(ConfigError, match="node2/cuda:0 computes on cuda, the model is on cpu"):
        assign_devices(nn.Linear(2, 2), config, 2)


# ── running ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_exception_comes_home_and_the_model_goes_on(short: WorkerPool) -> None:
    model = managed(short)
    with pytest.raises(ValueError, match="an entry of") as caught:
        model(torch.ones(2, 8), "raise")
    assert any("worker 0, forward of layers.3" in note for note in getattr(caught.value, "__notes__", []))
    assert float(model.layers[3].count) == 3  # written before it raised, as on one device
    model(torch.ones(2, 8)).sum().backward()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("number", "text"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "did not reply for 3 s")],
    ids=["killed", "stopped"],
)
def test_a_worker_that_is_lost_is_named_and_the_model_goes_on_here(number: int, text: str, short: WorkerPool) -> None:
    model = managed(short)
    expected = model(torch.ones(2, 8)).detach()
    os.kill(short.workers[0].process.pid, number)
    with pytest.raises(WorkerError) as caught:
        model(torch.ones(2, 8))
    assert "on 127.0.0.1)" in str(caught.value)
    assert "forward of layers.0" in str(caught.value)
    assert text in str(caught.value)
    assert torch.equal(model(torch.ones(2, 8)).detach(), expected)


def test_a_host_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_agent, "PING", 0.2)
    pool = loopback_pool([CPU])
    model = managed(pool)
    pool.cluster.agents[0].is_cut = True  # type: ignore[union-attr]
    wait_until(lambda: bool(pool.workers[0].process.lost))  # type: ignore[attr-defined]
    with pytest.raises(WorkerError, match="is lost: no answer"):
        model(torch.ones(2, 8))
    model(torch.ones(2, 8)).sum().backward()


PROGRAM = """
import os, sys, torch
from tests.runtime.hosts.test_host_faults import Model, dispatch, ManagedModel, loopback_pool, CPU
torch.manual_seed(0)
pool = loopback_pool([CPU])
model = Model()
dispatch.manage(model, ManagedModel(model, pool, quiet=True))
for _ in range(2):
    model(torch.ones(2, 8))
print(pool.workers[0].process.pid, flush=True)
while True:
    model(torch.ones(2, 8)).sum().backward()
"""


def test_a_controller_that_is_killed_leaves_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        try:
            assert program.stdout is not None
            pid = int(program.stdout.readline())
            assert pid in children(program.pid)
        finally:
            program.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text())


def wait_until(done: Callable[[], bool], seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.02)
