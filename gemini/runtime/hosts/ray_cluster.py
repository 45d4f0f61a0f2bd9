"""Ray cluster: the hosts of a Ray cluster, to which a driver process speaks (`gemini.runtime.hosts.ray_driver`)."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import socket
import sys
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from datetime import timedelta
from pathlib import Path
from typing import Any

from gemini.config.host_address import ANY_HOST, worker_at
from gemini.errors import ConfigError, Fault, WorkerError
from gemini.runtime.hosts import spawn
from gemini.runtime.hosts.host_agent import HostAgent
from gemini.runtime.hosts.own_address import address_towards
from gemini.runtime.transport.gloo_pair import MeetingPoint

_DRIVER = "gemini.runtime.hosts.ray_driver"
_REACHING, _CONNECTING, _SUPERVISING = 5.0, 60.0, 90.0  # seconds
_TOKEN = "RAY_AUTH_TOKEN"
_DEFAULT_TOKEN = Path("~/.ray/auth_token")
_numbers = itertools.count(1)  # of meetings, unique in the process


def has_token() -> bool:
    """Whether this user has a token for Ray."""
    return bool(os.environ.get(_TOKEN)) or token_path().is_file()


def token_path() -> Path:
    """Return the file of the token, which need not exist."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or _DEFAULT_TOKEN).expanduser()


def check_reachable(address: str) -> None:
    """Raise ConfigError where a cluster cannot be joined: no token, no Ray, or nothing at that address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError([Fault(f"cluster = {address!r} is no address", "write HOST:PORT, as in 10.0.0.1:6380")])
    if not has_token():
        what = f"there is no token for the Ray cluster at {address}: anyone could run code on it"
        remedy = "start the cluster with one (gemini cluster up), and set RAY_AUTH_TOKEN_PATH to its file"
        raise ConfigError([Fault(what, remedy)])
    if importlib.util.find_spec("ray") is None:
        raise ConfigError([Fault("Ray is not installed", "pip install 'gemini-instrumenter[ray]'")])
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHING).close()
    except OSError as error:
        remedy = "start it: gemini cluster up --address IP; or name another one"
        raise ConfigError([Fault(f"there is no Ray cluster at {address}: {error}", remedy)]) from None


class RayCluster:
    """The hosts of a Ray cluster."""

    def __init__(self, address: str) -> None:
        check_reachable(address)
        self.address, self.host = address, address_towards(address)
        ours, theirs = socket.socketpair()
        self._lines = ours.makefile("rw", encoding="utf-8", newline="\n")
        self._connection, self._waiting, self._writing = ours, dict[int, Future[Any]](), threading.Lock()
        self._requests = itertools.count(1)
        self._process = spawn.start_process((theirs.fileno(),), 1, _DRIVER, {"RAY_AUTH_MODE": "token"})
        theirs.close()
        threading.Thread(target=self._read, name="gemini-ray", daemon=True).start()
        try:
            said = self.ask("connect", _CONNECTING, address=address, host=self.host, code=_code_folder())
            self.hosts = said["hosts"]
            self._store = _listen(self.host)
        except WorkerError as error:
            self.close()
            raise ConfigError([Fault(*_split(str(error)))]) from None

    def place(self, names: list[str], shards: int) -> list[str]:
        """Reserve room for each worker on a host."""
        found = [(at, address) for at, name in enumerate(names) if (address := worker_at(name)) is not None]
        wanted = [("" if one.host == ANY_HOST else one.host, one.device.partition(":")[0]) for _, one in found]
        together = shards if all(not host for host, _ in wanted) else 1
        try:
            hosts = self.ask("place", _SUPERVISING, wanted=wanted, together=together)
        except WorkerError as error:
            raise ConfigError([Fault(*_split(str(error)))]) from None
        placed = list(names)
        self._numbers_of = {}
        for number, ((at, address), host) in enumerate(zip(found, hosts, strict=True)):
            placed[at] = address.device if host == self.host else f"{host}/{address.device}"
            self._numbers_of[at] = number
        return placed

    def supervise(self, index: int, name: str) -> tuple[HostAgent, dict[str, Any]]:
        """Create the actor of a worker."""
        address = worker_at(name)
        assert address is not None
        number = self._numbers_of[index]
        try:
            said = self.ask("supervise", _SUPERVISING, worker=number, kind=address.device.partition(":")[0])
        except WorkerError as error:
            raise ConfigError([Fault(*_split(str(error)))]) from None
        return RayAgent(self, number, address.host), said

    def meeting(self) -> MeetingPoint:
        """Return a new prefix of the store that this process serves."""
        return MeetingPoint(self.host, self._store.port, f"{os.getpid()}/{next(_numbers)}")

    def join(self, meeting: MeetingPoint) -> Any:
        """Return that part of the store."""
        import torch.distributed as dist

        return dist.PrefixStore(meeting.prefix, self._store)

    def ask(self, what: str, patience: float, **given: Any) -> Any:
        """Return the driver's answer; raise WorkerError with its reason, or after so many seconds."""
        number, future = next(self._requests), Future[Any]()
        self._waiting[number] = future
        try:
            with self._writing:
                self._lines.write(json.dumps({"number": number, "do": what, "given": given}) + "\n")
                self._lines.flush()
            found = future.result(patience)
        except (OSError, ValueError):
            raise WorkerError("the connection to Ray is closed") from None
        except Late:
            raise WorkerError(f"Ray at {self.address} has not answered for {patience:.0f} s") from None
        finally:
            self._waiting.pop(number, None)
        if "error" in found:
            raise WorkerError(found["error"])
        return found["answer"]

    def tell(self, what: str, **given: Any) -> None:
        """Send a request without waiting for its answer."""
        try:
            with self._writing:
                self._lines.write(json.dumps({"number": 0, "do": what, "given": given}) + "\n")
                self._lines.flush()
        except (OSError, ValueError):
            return  # it has ended, and with it all actors

    def _read(self) -> None:
        try:
            for line in self._lines:
                found = json.loads(line)
                future = self._waiting.get(found["number"])
                if future is not None:
                    future.set_result(found)
        except (OSError, ValueError):
            pass
        for future in list(self._waiting.values()):
            future.set_result({"error": "the process that speaks to Ray has ended"})

    def close(self) -> None:
        """End the driver: Ray ends its actors and frees what was reserved."""
        self._process.kill()
        self._connection.close()


class RayAgent:
    """Carries requests to an actor."""

    def __init__(self, cluster: RayCluster, number: int, host: str) -> None:
        self.host, self._cluster, self._number = host, cluster, number

    def call(self, method: str, seconds: float, **given: Any) -> dict[str, Any]:
        """Return the actor's answer."""
        found: dict[str, Any] = self._cluster.ask(
            "call", seconds + 0.5, worker=self._number, method=method, given=given, seconds=seconds
        )
        return found

    def release(self) -> None:
        """End the actor."""
        self._cluster.tell("release", worker=self._number)


def _listen(host: str) -> Any:
    """Return a store that listens on one address of this host."""
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_CONNECTING),
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _code_folder() -> str:
    """Return the folder of the script; the current one where there is none."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return str(Path(file).resolve().parent) if file else os.getcwd()


def _split(text: str) -> tuple[str, str]:
    what, _, remedy = text.partition("\n    → ")
    return what, remedy or "see the logs of Ray on that host (/tmp/ray/session_latest/logs)"
