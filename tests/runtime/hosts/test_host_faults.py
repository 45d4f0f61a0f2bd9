"""Faults between hosts are reported within seconds, with a remedy, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gemini.runtime.hosts.handshake import MAGIC
from torch import nn

from gemini import GeminiConfig
from gemini.cli.main import main
from gemini.config.host_address import worker_at
from gemini.errors import ConfigError, WorkerError
from gemini.runtime.devices.worker_devices import assign_devices
from gemini.runtime.hosts import shared_secret
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.runtime.hosts.local_host import ROOT, Host, children

pytestmark = pytest.mark.usefixtures("trusted_tests")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    made = Host(tmp_path)
    monkeypatch.setenv(shared_secret.ENVIRONMENT, str(made.secret_file))
    yield made
    made.close()


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(tmp_path_factory.mktemp("host"), "--keep")
    yield made
    made.close()


@pytest.fixture
def kept(listening: Host, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host that serves one controller after the other."""
    monkeypatch.setenv(shared_secret.ENVIRONMENT, str(listening.secret_file))
    return listening


class Layer(nn.Module):
    """Does what `deed` says when it is not 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, deed: str = "") -> torch.Tensor:
        self.count += 1
        if deed == "raise":
            raise ValueError(f"an entry of {x[0, 0].item():.0f}")
        if deed == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        if deed == "sleep":
            time.sleep(600)
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])

    def forward(self, x: torch.Tensor, deed: str = "") -> torch.Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(x, deed if at == 3 else "")
        return x


def managed(host: Host, timeout: float = 30.0) -> tuple[Model, WorkerPool]:
    torch.manual_seed(0)
    pool = WorkerPool(1, 1, timeout, [host.cpu])
    model = Model()
    dispatch.manage(model, ManagedModel(model, pool, quiet=True))
    for _ in range(2):
        model(torch.ones(2, 8))
    return model, pool


# ── starting ───────────────────────────────────────────────────────────────────────────────────────────────────────
def refused(device: str) -> str:
    with pytest.raises(WorkerError) as caught:
        WorkerPool(1, 1, 30.0, [device])
    return str(caught.value)


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"x" * 20)
    file.chmod(0o600)
    monkeypatch.setenv(shared_secret.ENVIRONMENT, str(file))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    text = refused(f"127.0.0.1:{port}/cpu")
    assert f"the worker at 127.0.0.1:{port} cannot be reached" in text
    assert f"gemini worker --listen 127.0.0.1:{port}" in text


@pytest.mark.parametrize("speech", [b"", b"HTTP/1.1 400 Bad Request\r\n" + b" " * 100, MAGIC[:-1] + b"9" + b" " * 32])
def test_somebody_else_listens(speech: bytes, kept: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:

        def answer() -> None:
            connection, _ = door.accept()
            connection.sendall(speech)
            if speech:
                connection.recv(1000)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        text = refused(f"127.0.0.1:{door.getsockname()[1]}/cpu")
        thread.join()
    assert "failed authentication" in text or "does not reply" in text


def test_another_secret(tmp_path: Path, kept: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"not the secret of that host")
    other.chmod(0o600)
    monkeypatch.setenv(shared_secret.ENVIRONMENT, str(other))
    assert "its secret is another one\n    → give both ends the same secret file" in refused(kept.cpu)
    assert kept.wait_for("refused 127.0.0.1: it does not know the secret")


def test_other_versions_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(tmp_path, begin="import gemini, torch; gemini.__version__ = '0.0.1'; torch.__version__ = '1.0'")
    try:
        monkeypatch.setenv(shared_secret.ENVIRONMENT, str(host.secret_file))
        text = refused(host.cpu)
        assert f"torch {torch.__version__} (this host) and 1.0 (its host)" in text
        assert "and 0.0.1 (its host)" in text
        assert "install the same versions" in text
    finally:
        host.close()


def test_a_device_that_is_not_there(kept: Host) -> None:
    text = refused(f"{kept.place}/cuda:7")
    assert "device 'cuda:7'" in text
    assert "map the worker to a device of that host" in text


def test_strangers_are_turned_away_and_do_not_disturb(kept: Host) -> None:
    address = worker_at(kept.cpu)
    assert address is not None
    silent = socket.create_connection((address.host, address.port))
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.sendall(MAGIC + bytes(32) + bytes(32))
        kept.wait_for("refused 127.0.0.1: it does not know the secret")
        found = b""
        while piece := stranger.recv(1000):
            found += piece
    assert len(found) == len(MAGIC) + 32  # nothing that proves anything
    model, pool = managed(kept)
    model(torch.ones(2, 8)).sum().backward()
    pool.stop()
    silent.close()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("short", "has 5 bytes"),
        ("x" * 20, "other users can read"),
        (None, "cannot be read"),
        ("", "no secret is given"),
    ],
)
def test_a_bad_secret_is_refused(
    text: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "secret"
    if text is not None:
        file.write_text(text)
        file.chmod(0o644 if reason.startswith("other users") else 0o600)
    monkeypatch.delenv(shared_secret.ENVIRONMENT, raising=False)
    assert main(["worker", "--secret-file", "" if text == "" else str(file)]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--listen", "9000"], ["--listen", "a:b"], ["--threads", "-1"], ["--listen", "h:70000"]]
)
def test_bad_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", *words]) == 2
    assert "→" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["node2/cpu", "node2:0/cpu", "node2:70000/cpu", "node2:9000", "a b:9000/cpu", ":1/cpu", "n:1/"]
)
def test_a_mapping_is_checked(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a device"):
        GeminiConfig(device_mapping={"stage_0": {"shard_0": name}})


@pytest.mark.parametrize("name", ["node2:9000/cpu", "10.0.0.2:1/cuda:3", "[fd00::2]:65535/cpu", "a-b.c:22/xpu"])
def test_addresses_round_trip(name: str) -> None:
    assert str(worker_at(name)) == name
    GeminiConfig(device_mapping={"stage_0": {"shard_0": name}})


def test_the_model_must_be_on_such_a_device() -> None:
    config = GeminiConfig(device_mapping={"stage_0": {"shard_0": "node2:9000/cuda:0"}, "stage_1": {"shard_0": "cpu"}})
    with pytest.raises(ConfigError, match="node2:9000/cuda:0 computes on cuda, the model is on cpu"):
        assign_devices(nn.Linear(2, 2), config, 2)


# ── running ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_exception_comes_home_and_the_model_goes_on(kept: Host) -> None:
    model, pool = managed(kept)
    with pytest.raises(ValueError, match="an entry of") as caught:
        model(torch.ones(2, 8), "raise")
    assert any("worker 0, forward of layers.3" in note for note in getattr(caught.value, "__notes__", []))
    assert float(model.layers[3].count) == 3  # written before it raised, as on one device
    model(torch.ones(2, 8)).sum().backward()
    pool.stop()


@pytest.mark.parametrize("deed", ["die", *(pytest.param(one, marks=pytest.mark.slow) for one in ("hang", "sleep"))])
def test_a_worker_that_is_lost_is_named_and_the_model_goes_on_here(deed: str, host: Host) -> None:
    model, _ = managed(host, 3.0)
    expected = model(torch.ones(2, 8)).detach()
    with pytest.raises(WorkerError) as caught:
        model(torch.ones(2, 8), deed)
    text = str(caught.value)
    assert f"at {host.place})" in text
    assert "forward of layers.3" in text
    assert ("SIGKILL" if deed == "die" else "did not reply for 3 s") in text
    assert deed != "sleep" or "test_host_faults.py" in text  # its stacks, which its host has asked for
    assert [float(layer.count) for layer in model.layers[2:]] == [4.0, 3.0]  # the failed call is undone
    assert torch.equal(model(torch.ones(2, 8)).detach(), expected)
    host.process.wait(20)
    assert not children(host.process.pid)


def test_a_listener_that_is_killed_takes_its_sessions_along(host: Host) -> None:
    model, _ = managed(host)
    (session,) = children(host.process.pid)
    host.process.kill()
    wait_until(lambda: not Path(f"/proc/{session}").exists() or "Z" in Path(f"/proc/{session}/stat").read_text())
    with pytest.raises(WorkerError, match="has closed its connection"):
        model(torch.ones(2, 8))


def test_a_listener_ends_with_its_controller(host: Host) -> None:
    _, pool = managed(host)
    pool.stop()
    assert host.process.wait(20) == 0


PROGRAM = """
import sys, torch
from tests.runtime.hosts.test_host_faults import Model, dispatch, ManagedModel, WorkerPool
torch.manual_seed(0)
pool = WorkerPool(1, 1, 30.0, [sys.argv[1]])
model = Model()
dispatch.manage(model, ManagedModel(model, pool, quiet=True))
for _ in range(2):
    model(torch.ones(2, 8))
print("now", flush=True)
while True:
    model(torch.ones(2, 8), sys.argv[2]).sum().backward()
"""


@pytest.mark.parametrize("deed", [pytest.param("", marks=pytest.mark.slow), "sleep"])
def test_a_controller_that_is_killed_leaves_nothing(deed: str, host: Host) -> None:
    environment = {**os.environ, shared_secret.ENVIRONMENT: str(host.secret_file), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, host.cpu, deed], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "now\n"
            assert children(host.process.pid)
        finally:
            program.kill()
    host.process.wait(20)
    assert not children(host.process.pid)


def wait_until(done: object, seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < ends
        time.sleep(0.02)
