"""Node agent: the process of a node other than rank 0's; it supervises the workers of that node.

    store of torch.distributed     request/RANK/N   {"worker": …, "method": …, "given": …}    from the controller
                                   reply/RANK/N     the answer of that worker's supervisor
                                   agent/RANK       the address of this node
                                   end              the exit code of the script

The store is that of torchrun, or served by rank 0. As in any program of torch.distributed, a process that
reaches it can take part in the run: use it in a trusted network.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NoReturn

from gemini.errors import WorkerError
from gemini.runtime.hosts.host_supervisor import HostSupervisor
from gemini.runtime.hosts.own_address import address_towards

NODES = "GEMINI_NODES"
PREFIX = "gemini"
_JOINING = timedelta(seconds=300)  # for all nodes to start
_SLICE = 0.02  # seconds
_ENDING = 3.0  # seconds for the agents to see the end


def serve_meeting(host: str, port: int, *, is_served: bool) -> Any:
    """Return the store at which the nodes meet; rank 0 serves it where the launcher does not."""
    import torch.distributed as dist

    try:
        store = dist.TCPStore(host, port, is_master=not is_served, wait_for_workers=False, timeout=_JOINING)
    except RuntimeError as error:
        raise WorkerError(
            f"the nodes cannot meet at {host}:{port}: {str(error).splitlines()[0]:.200}\n"
            "    → set MASTER_ADDR to an address of the host of rank 0, and MASTER_PORT to a free port"
        ) from None
    return dist.PrefixStore(PREFIX, store)


def end_agents(store: Any, count: int, code: int) -> None:
    """Tell the agents how the script has ended, and wait a moment until they know."""
    try:
        store.set("end", str(code))
        deadline = time.monotonic() + _ENDING
        known = [f"agent/{rank}" for rank in range(1, count)]
        while time.monotonic() < deadline and not all(store.check([f"{key}/ended"]) for key in known):
            time.sleep(0.05)
    except RuntimeError:
        return  # the launcher has ended its store: the agents see that, too


class NodeAgent:
    """The agent of one node."""

    def __init__(self, host: str, port: int, rank: int) -> None:
        self._store = serve_meeting(host, port, is_served=True)
        self._replies = serve_meeting(host, port, is_served=True)
        self.rank, self._address = rank, address_towards(host)
        self._supervisors: dict[int, HostSupervisor] = {}

    def serve(self) -> NoReturn:
        """Answer requests until the script ends; exit with its code, 1 if rank 0 is lost."""
        self._store.set(f"agent/{self.rank}", self._address)
        number = 0
        try:
            with ThreadPoolExecutor(32) as threads:
                while not self._store.check(["end"]):
                    key = f"request/{self.rank}/{number}"
                    if self._has(key):
                        request = json.loads(self._store.get(key))
                        self._store.delete_key(key)
                        threads.submit(self._answer, number, request)
                        number += 1
                code = int(self._store.get("end"))
                self._store.set(f"agent/{self.rank}/ended", "")
                self._leave(code if code >= 0 else 128 - code)
        except RuntimeError:
            self._leave(1)  # the store is gone, and rank 0 with it

    def _has(self, key: str) -> bool:
        """Return whether a key is set, or is not after a moment; raise RuntimeError if the store is gone."""
        if self._store.check([key]):
            return True
        time.sleep(_SLICE)
        return False

    def _answer(self, number: int, request: dict[str, Any]) -> None:
        worker = request["worker"]
        if worker not in self._supervisors:
            self._supervisors[worker] = HostSupervisor(self._address, lambda: os._exit(1))
        try:
            reply: dict[str, Any] = {"answer": self._supervisors[worker].answer(request["method"], **request["given"])}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        if request["replies"]:
            self._replies.set(f"reply/{self.rank}/{number}", json.dumps(reply))

    def _leave(self, code: int) -> NoReturn:
        for supervisor in self._supervisors.values():
            supervisor.end()
        os._exit(code)
