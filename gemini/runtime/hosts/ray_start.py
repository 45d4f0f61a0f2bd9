"""Ray start: the processes of Ray on this host, as `gemini cluster up` starts and `gemini cluster down` ends them.

`ray start --block` runs in a session of its own, and ends its processes when it is ended. Its process group is noted in
a file, so that `down` ends these processes and no others of Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError, Fault, WorkerError
from gemini.runtime.hosts.own_address import address_towards
from gemini.runtime.hosts.ray_cluster import has_token, token_path

_STARTING, _JOINING, _ENDING = 60.0, 15.0, 10.0  # seconds
_SCRIPT = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; sys.exit(main())"


def _note_path() -> Path:
    """Return the file that notes what runs on this host: several hosts may share a home."""
    return Path(f"~/.ray/gemini-cluster-{socket.gethostname()}.json").expanduser()


def start(host: str, port: int, join: str, cpus: int) -> str:
    """Start Ray on this host; return the address of the cluster."""
    note = _note_path()
    if note.exists() and _is_running(json.loads(note.read_text())["group"]):
        raise ConfigError([Fault("gemini cluster up has started Ray on this host already", "gemini cluster down")])
    try:
        import ray  # noqa: F401
    except ImportError:
        raise ConfigError([Fault("Ray is not installed", "pip install 'gemini-instrumenter[ray]'")]) from None
    if not has_token():
        if join:
            what = f"there is no token for the cluster at {join}"
            raise ConfigError([Fault(what, f"copy {token_path()} from its first host to this one")])
        _make_token()
    if join:
        _await_cluster(join)
    own = address_towards(join) if join else host
    where = ["--address", join] if join else ["--head", "--port", str(port), "--include-dashboard=false"]
    count = ["--num-cpus", str(cpus)] if cpus else []
    note.parent.mkdir(parents=True, exist_ok=True)
    log = note.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, "start", "--block", "--disable-usage-stats", "--node-ip-address", own,
             *where, *count],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env={**os.environ, "RAY_AUTH_MODE": "token"},
        )  # fmt: skip
    try:
        note.write_text(json.dumps({"group": process.pid}))
        _await_start(process, log)
    except BaseException:  # an interrupt, too, leaves nothing
        end()
        raise
    return join or f"{host}:{port}"


def end() -> str:
    """End what `start` has started on this host; return what that was."""
    note = _note_path()
    if not note.exists():
        return "nothing: no cluster was started by gemini cluster up"
    group = json.loads(note.read_text())["group"]
    note.unlink()
    if not _is_running(group):
        return "nothing: Ray had ended before"
    os.killpg(group, signal.SIGTERM)
    deadline = time.monotonic() + _ENDING
    while _is_running(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    return "Ray"


def leave_on_signals() -> None:
    """Turn the signals of job managers into an orderly end of this process."""

    def leave(number: int, _: Any) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def wait() -> None:
    """Wait until what `start` has started on this host ends; end it with this process."""
    note = _note_path()
    try:
        while note.exists() and _is_running(json.loads(note.read_text())["group"]):
            time.sleep(0.5)
    except KeyboardInterrupt:
        pass
    finally:
        end()


def _await_cluster(address: str) -> None:
    """Wait until something listens at an address: hosts of one job start at the same time."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError([Fault(f"--join {address} is no address", "write HOST:PORT, as in 10.0.0.1:6380")])
    deadline = time.monotonic() + _JOINING
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _JOINING).close()
            return
        except OSError as error:
            if time.monotonic() > deadline or isinstance(error, socket.gaierror):
                remedy = "start it there first: gemini cluster up --address IP"
                raise ConfigError([Fault(f"there is no Ray cluster at {address}: {error}", remedy)]) from None
        time.sleep(0.3)


def _make_token() -> None:
    path = token_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


def _await_start(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until Ray says that it runs; raise WorkerError with its last line if it ends."""
    deadline = time.monotonic() + _STARTING
    while "Ray runtime started" not in (said := log.read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline:
            lines = [line for line in said.splitlines() if line.strip()] or ["it says nothing"]
            raise WorkerError(f"Ray does not start on {socket.gethostname()}: {lines[-1]:.300}\n    → see {log}")
        time.sleep(0.1)


def _is_running(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
