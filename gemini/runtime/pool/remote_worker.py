"""A worker on another host, as the controller sees it: asked like any other, but it shares no memory.

It has copies of its units' tensors. What the program has written to them since is sent before each forward and
backward, what the unit writes comes back before the reply: see `gemini.runtime.memory.replica_sync`.
"""

from __future__ import annotations

import contextlib
from typing import Any

from gemini.config.host_address import Address, worker_at
from gemini.errors import WorkerError
from gemini.runtime.devices.registry import class_path, create_device
from gemini.runtime.devices.remote_device import RemoteDevice, gpu_identity
from gemini.runtime.hosts import shared_secret as secrets
from gemini.runtime.hosts.code_versions import source_hashes
from gemini.runtime.hosts.host_connection import RemoteProcess, connect
from gemini.runtime.memory.replica_sync import ReplicaSync
from gemini.runtime.memory.shared_layout import MisplacedTensor
from gemini.runtime.memory.shared_parameters import PlacedModule
from gemini.runtime.pool.worker_failure import LESS_MEMORY, describe_contents
from gemini.runtime.pool.worker_handle import START_TIMEOUT, InternalFault, WorkerHandle, track_worker
from gemini.runtime.protocol import (
    Backward,
    Done,
    Forget,
    Forward,
    InstallModules,
    InstallReplica,
    Outputs,
    WriteTensors,
)
from gemini.runtime.transport.channel import ChannelClosed
from gemini.runtime.transport.dist_p2p import P2PChannel
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.remote_link import RemoteLink
from gemini.runtime.transport.tcp_channel import TcpChannel


class RemoteWorker(WorkerHandle):
    """One worker, named as in a device mapping; the model is on the device `home` here."""

    is_remote = True
    output_location = "on its host"
    process: RemoteProcess  # type: ignore[assignment]

    def __init__(self, index: int, timeout: float, team: list[WorkerHandle], name: str, home: str) -> None:
        self._home = home
        self.copies: dict[int, tuple[int, ReplicaSync]] = {}  # by unit: number of the first tensor
        self._placed = 0
        self._unit_of: dict[int, int] = {}  # by call whose graph is kept
        super().__init__(index, 0, timeout, team, name)

    # ── its start ──────────────────────────────────────────────────────────────────────────────────────────────
    def _start(self, threads: int, device: str) -> None:  # noqa: ARG002
        """Ask for a process; `greet` waits for it, so that all workers start at the same time."""
        address = worker_at(device)
        assert address is not None
        self.address: Address = address
        self.device, self.stacks = RemoteDevice(device, create_device(self._home)), -1
        known = secrets.read_secret()
        request = {
            "device": address.device,
            "back_end": class_path(address.device),
            "timeout": self._long,
            "gpu": gpu_identity(self.device),
        }
        session, self._answer = connect(address, known, request)
        self.process = RemoteProcess(address, known, session, self._answer)
        self.link = Link(TcpChannel(session.connection, session.key, 0))
        self.link.channel.set_send_timeout(self._long)
        track_worker(self)
        self.team.append(self)

    def await_ready(self) -> None:
        """Meet the process, and wait until it is up."""
        channel, host = self.link.channel, self.link.channel.connection.getsockname()[0]
        try:
            lane = P2PChannel(channel, 0, host, self._long, (gpu_identity(self.device), self._answer["gpu"]))
        except ChannelClosed:
            raise self.report_death() from None
        self.link = RemoteLink(channel, lane)
        self._say_hello(self._answer["threads"], self._answer["path"], self.address.device)
        super().await_ready()

    @property
    def _long(self) -> float:
        return max(self.timeout, START_TIMEOUT)

    @property
    def title(self) -> str:
        """With its host."""
        return f"worker {self.index} (process {self.process.pid} at {self.address.place})"

    # ── asking ─────────────────────────────────────────────────────────────────────────────────────────────────
    def ask(self, request: Any, what: str, descriptors: tuple[int, ...] = (), timeout: float = 0.0) -> Any:
        """As always, after what the request relies on."""
        reply = super().ask(
            lambda: self._prepared(request() if callable(request) else request), what, descriptors, timeout
        )
        if not isinstance(reply, Outputs) or not any(reply.differentiable):  # nobody will ask for its backward
            self._unit_of.pop(getattr(reply, "number", 0), None)
        return reply

    def _prepared(self, request: Any) -> Any:
        """Tell what is new. The thread has the right to send, and goes on to send the request."""
        self.link.held = {}  # an argument that is a parameter travels as it is: the copies are each a unit's own
        if isinstance(request, Forward):
            self._unit_of[request.number] = request.unit
            self._refresh(request.unit)
        elif isinstance(request, Backward):
            self._refresh(self._unit_of.get(request.call, -1))
        elif isinstance(request, InstallReplica):
            self._unit_of = {call: one for call, one in self._unit_of.items() if one in self.copies}
        elif isinstance(request, InstallModules):
            for unit in request.units:
                first, ledger = self.copies[unit]
                self.link.held = {id(tensor): number for number, tensor in enumerate(ledger.tensors, first)}
        for call in getattr(request, "dropped", ()):
            self._unit_of.pop(call, None)
        return request

    def _refresh(self, unit: int) -> None:
        found = self.copies.get(unit)
        if found is None:
            return
        places, contents = found[1].differing()
        if places:
            try:
                self.link.send(WriteTensors(0, unit, places, contents))
            except BaseException:
                self.link.channel.is_broken = True  # the ledger says what the worker does not have
                raise

    def handle_unsolicited(self, news: Any) -> None:
        """News; among them what a unit has written."""
        if not isinstance(news, WriteTensors):
            super().handle_unsolicited(news)
        elif news.unit in self.copies:
            self.copies[news.unit][1].take(news.places, news.tensors)

    # ── the model's tensors ────────────────────────────────────────────────────────────────────────────────────
    def ensure_shared(self, unit: PlacedModule) -> bool:
        """See to it that it has copies of a unit's tensors that can hold their contents."""
        for tensor in unit.held:
            if tensor.device != unit.shared_parameters.outside:
                raise MisplacedTensor(f"a tensor of it is on {tensor.device}, its worker's on {self.address}")
        found = self.copies.get(unit.number)
        if found is not None and found[1].fits(unit.held):
            found[1].tensors = list(unit.held)
            return False
        unit.shared_parameters.pool.flush_forgotten()
        ledger, first = ReplicaSync(unit.held), self._placed
        self._placed += len(unit.held)
        request = InstallReplica(
            self.next_number(), unit.number, first, ledger.homes, source_hashes(unit.module), ledger.known
        )  # fmt: skip
        reply = self.ask(request, f"take the tensors of {unit.name}")
        if not isinstance(reply, Done):
            raise MisplacedTensor(
                f"the worker cannot take it: {getattr(reply, 'reason', reply)!s:.300}".partition("\n")[0]
            )
        self.copies[unit.number] = first, ledger
        return True

    def leave(self, unit: PlacedModule) -> None:
        """A unit runs in the program's process now: its tensors are there."""
        if self.copies.pop(unit.number, None) is not None and not self.loss:
            with contextlib.suppress(InternalFault, WorkerError):  # the next call will say so
                self.ask(Forget(self.next_number(), [unit.number], []), f"forget {unit.name}")

    def forget(self, units: list[int]) -> None:
        """Units of a model that is gone."""
        for unit in units:
            self.copies.pop(unit, None)

    # ── its end ────────────────────────────────────────────────────────────────────────────────────────────────
    def _killed(self) -> tuple[str, str]:
        held = f"it held {describe_contents(self.holds)}" if self.holds else ""
        return held, f"out of memory shows as SIGKILL: see the log of {self.address.place}; {LESS_MEMORY}"

    def _read_stacks(self) -> str:
        return self.process.stacks
