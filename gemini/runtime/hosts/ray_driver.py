"""Ray driver: a process beside the controller that speaks to Ray on its behalf.

    controller  ◄── lines of JSON ──►  driver  ◄── Ray ──►  actors, one for each worker on another host

Ray lives in this process only: a script that uses Ray itself, or another version of its settings, is not disturbed.
The process ends with the controller; Ray then ends its actors and frees what was reserved.

    connect   joins the cluster, with the script's code, and describes its hosts
    place     reserves room for all workers, and says on which host each is
    supervise creates the actor of one worker
    call      passes a request to an actor
    release   ends an actor
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError, GeminiError

_SLICE = 0.1  # seconds
_REFUSED, _SAID = b"InvalidAuthToken", 1 << 20  # in what Ray writes, of so many bytes
_PLACING = 10.0  # seconds that Ray may take to reserve what is there
_ANSWERING = 10.0  # seconds for a call without a token, at most
_WITHOUT_TOKEN = """
import os, sys
os.environ["RAY_AUTH_MODE"] = "disabled"
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=5)
"""
_STARTING = 60.0  # seconds for an actor, with the code it needs


class DriverError(Exception):
    """A request cannot be carried out, for a reason that the user should read."""


def main() -> None:
    """Serve the controller until it is gone."""
    from gemini.runtime.worker.worker_process import bind_to_parent

    connection, parent = (int(one) for one in sys.argv[1:3])
    bind_to_parent(parent)
    said = os.memfd_create("gemini-ray")
    for descriptor in (1, 2):  # Ray writes to the terminal of the script
        os.dup2(said, descriptor)
    driver = RayDriver(said)
    lines = socket.socket(fileno=connection).makefile("rw", encoding="utf-8", newline="\n")
    writing = threading.Lock()

    def serve(line: str) -> None:
        request = json.loads(line)
        try:
            found: dict[str, Any] = {"answer": getattr(driver, request["do"])(**request["given"])}
        except ConfigError as error:
            found = {"error": "\n    → ".join((error.faults[0].what, error.faults[0].remedy))}
        except (DriverError, GeminiError) as error:
            found = {"error": str(error)}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        with writing, contextlib.suppress(OSError):
            lines.write(json.dumps({"number": request["number"], **found}) + "\n")
            lines.flush()

    with ThreadPoolExecutor(64) as threads:
        for line in lines:
            threads.submit(serve, line)
        os._exit(0)


class RayDriver:
    """The requests of the controller."""

    def __init__(self, said: int) -> None:
        self._said = said  # what Ray has written
        self._actors: dict[int, Any] = {}  # by worker
        self._group: Any = None
        self._hosts: list[str] = []  # of the workers
        self._together = 1  # workers per bundle

    def connect(self, address: str, host: str, code: str) -> dict[str, Any]:
        """Join the cluster; return this host's address, and its hosts."""
        import ray

        with tempfile.TemporaryDirectory(prefix="gemini-code-") as folder, _call_without_token(address) as is_open:
            from gemini.runtime.hosts.travelling_code import copy_code

            environment = {"working_dir": folder} if copy_code(Path(code), Path(folder)) else {}
            joining = ThreadPoolExecutor(1).submit(
                ray.init, address=address, namespace="gemini", runtime_env=environment, log_to_driver=False,
                logging_level="CRITICAL", configure_logging=False, _node_ip_address=host,
            )  # fmt: skip
            while not wait([joining], _SLICE).done:
                if _REFUSED in os.pread(self._said, _SAID, 0):  # Ray tries again for 20 s
                    raise DriverError(_explain(_REFUSED.decode(), address))
            if (error := joining.exception()) is not None:
                raise DriverError(_explain(str(error), address))
            if is_open():
                raise DriverError(
                    f"the Ray cluster at {address} requires no token: anyone could run code on it\n"
                    "    → start it with RAY_AUTH_MODE=token on every host, or by gemini cluster up"
                )
        return {"host": host, "hosts": [one["NodeManagerAddress"] for one in _alive()]}

    def place(self, wanted: list[tuple[str, str]], together: int) -> list[str]:
        """Reserve room for each worker, given by host ("" for any) and kind of device; return their hosts.

        So many workers that follow each other share a bundle, and with it a host.
        """
        from ray.util import placement_group_table
        from ray.util.placement_group import placement_group

        addresses = {name: one["NodeManagerAddress"] for one in _alive() for name in _names(one)}
        unknown = sorted({host for host, _ in wanted if host and host not in addresses})
        if unknown:
            raise DriverError(f"no host {', '.join(unknown)} in the cluster\n    → its hosts are {_describe_hosts()}")
        bundles = [
            {"GPU" if kind == "cuda" else "CPU": float(together)} | ({f"node:{addresses[host]}": 0.001} if host else {})
            for host, kind in wanted[::together]
        ]
        self._group = placement_group(bundles, strategy="SPREAD")
        if not self._group.wait(_PLACING):
            counts = Counter(f"{kind} on {host or 'any host'}" for host, kind in wanted)
            kinds = ", ".join(f"{count} × {kind}" for kind, count in counts.items())
            raise DriverError(
                f"no hosts have room for these workers: {kinds}\n    → the hosts are {_describe_hosts()}; "
                "map fewer workers, or end other programs on the cluster"
            )
        at = placement_group_table(self._group)["bundles_to_node_id"]
        nodes = {one["NodeID"]: one["NodeManagerAddress"] for one in _alive()}
        self._together = together
        self._hosts = [nodes[at[worker // together]] for worker in range(len(wanted))]
        return self._hosts

    def supervise(self, worker: int, kind: str) -> dict[str, Any]:
        """Create the actor of a worker; return what it says about its host."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from gemini.runtime.hosts.ray_supervisor import RaySupervisor

        at = worker // self._together
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=at)
        resources = {"num_gpus": 1, "num_cpus": 0} if kind == "cuda" else {"num_cpus": 1}
        actor = ray.remote(RaySupervisor).options(scheduling_strategy=place, max_concurrency=8, **resources)
        self._actors[worker] = actor.remote(self._hosts[worker])
        try:
            return self.call(worker, "describe", {}, _STARTING)
        except Exception as error:
            raise DriverError(f"a worker cannot start on {self._hosts[worker]}: {_explain_actor(error)}") from None

    def call(self, worker: int, method: str, given: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer of an actor."""
        import ray

        found: dict[str, Any] = ray.get(self._actors[worker].answer.remote(method, given), timeout=seconds)
        return found

    def release(self, worker: int) -> dict[str, Any]:
        """End an actor."""
        import ray

        actor = self._actors.pop(worker, None)
        if actor is not None:
            ray.kill(actor)
        return {}


@contextlib.contextmanager
def _call_without_token(address: str) -> Iterator[Callable[[], bool]]:
    """Call a cluster without a token, in the background; yield a function that waits for whether it has answered."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    caller = subprocess.Popen(
        [sys.executable, "-c", _WITHOUT_TOKEN, address], env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def has_answer() -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return caller.wait(_ANSWERING) == 0
        return False

    try:
        yield has_answer
    finally:
        caller.kill()
        caller.wait()


def _alive() -> list[dict[str, Any]]:
    import ray

    return [one for one in ray.nodes() if one["Alive"]]


def _names(node: dict[str, Any]) -> set[str]:
    return {node["NodeManagerAddress"], node["NodeManagerHostname"]}


def _describe_hosts() -> str:
    found = []
    for one in _alive():
        counts = [f"{one['Resources'].get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU")]
        found.append(f"{one['NodeManagerAddress']} ({', '.join(counts)})")
    return ", ".join(found)


def _explain(said: str, address: str) -> str:
    """Return why a cluster cannot be joined, with a remedy."""
    text = " ".join(said.split())
    if "InvalidAuthToken" in text or "uthenti" in text:
        return (
            f"the Ray cluster at {address} refused the token\n"
            "    → set RAY_AUTH_TOKEN_PATH to the token of that cluster"
        )
    if "ersion mismatch" in text:
        return f"the cluster at {address} has other versions: {text:.300}\n    → install the same versions on all hosts"
    remedy = f"start it: gemini cluster up; on this host, to join one: gemini cluster up --join {address}"
    return f"the Ray cluster at {address} cannot be joined: {text:.300}\n    → {remedy}"


def _explain_actor(error: Exception) -> str:
    text = str(error).strip()
    last = text.splitlines()[-1] if text else ""
    if "No module named 'gemini'" in text:
        return "Gemini is not installed there\n    → install the same version of gemini-instrumenter on every host"
    return f"{type(error).__name__}: {last:.300}"
