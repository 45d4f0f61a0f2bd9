"""Remote worker: the handle of a worker on another host. Requested like any other, but it shares no memory.

It has replicas of its modules' tensors. Before each forward and backward the controller sends what the script has
written since; what the module writes comes back before the reply: see `gemini.runtime.memory.replica_sync`.
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
    """One worker, named as in a device mapping; the model is on a device of this host."""

    is_remote = True
    output_location = "on its host"
    process: RemoteProcess  # type: ignore[assignment]

    def __init__(self, index: int, timeout: float, team: list[WorkerHandle], name: str, model_device: str) -> None:
        self._model_device = model_device
        self.replicas: dict[int, tuple[int, ReplicaSync]] = {}  # by module: number of the first tensor
        self._placed = 0
        self._module_of: dict[int, int] = {}  # by call with a retained graph
        super().__init__(index, 0, timeout, team, name)

    # ── its start ──────────────────────────────────────────────────────────────────────────────────────────────
    def _start(self, threads: int, device: str) -> None:  # noqa: ARG002
        """Request a process; `await_ready` waits for it, so that all workers start at the same time."""
        address = worker_at(device)
        assert address is not None
        self.address: Address = address
        self.device, self.stacks = RemoteDevice(device, create_device(self._model_device)), -1
        known = secrets.read_secret()
        request = {
            "device": address.device,
            "back_end": class_path(address.device),
            "timeout": self._start_timeout,
            "gpu": gpu_identity(self.device),
        }
        session, self._answer = connect(address, known, request)
        self.process = RemoteProcess(address, known, session, self._answer)
        self.link = Link(TcpChannel(session.connection, session.key, 0))
        self.link.channel.set_send_timeout(self._start_timeout)
        track_worker(self)
        self.team.append(self)

    def await_ready(self) -> None:
        """Connect to the process, and wait until it is up."""
        channel, host = self.link.channel, self.link.channel.connection.getsockname()[0]
        try:
            p2p = P2PChannel(channel, 0, host, self._start_timeout, (gpu_identity(self.device), self._answer["gpu"]))
        except ChannelClosed:
            raise self.report_death() from None
        self.link = RemoteLink(channel, p2p)
        self._say_hello(self._answer["threads"], self._answer["path"], self.address.device)
        super().await_ready()

    @property
    def _start_timeout(self) -> float:
        return max(self.timeout, START_TIMEOUT)

    @property
    def title(self) -> str:
        """With its host."""
        return f"worker {self.index} (process {self.process.pid} at {self.address.place})"

    # ── asking ─────────────────────────────────────────────────────────────────────────────────────────────────
    def ask(self, request: Any, what: str, descriptors: tuple[int, ...] = (), timeout: float = 0.0) -> Any:
        """Send the changes that a request relies on, then the request."""
        reply = super().ask(
            lambda: self._prepare(request() if callable(request) else request), what, descriptors, timeout
        )
        if not isinstance(reply, Outputs) or not any(reply.differentiable):  # no backward follows
            self._module_of.pop(getattr(reply, "number", 0), None)
        return reply

    def _prepare(self, request: Any) -> Any:
        """Send changes of tensors. The thread has the right to send and sends the request next."""
        self.link.shared_numbers = {}  # a parameter among the arguments travels by value: replicas belong to one module
        if isinstance(request, Forward):
            self._module_of[request.number] = request.module
            self._refresh(request.module)
        elif isinstance(request, Backward):
            self._refresh(self._module_of.get(request.call, -1))
        elif isinstance(request, InstallReplica):
            self._module_of = {call: one for call, one in self._module_of.items() if one in self.replicas}
        elif isinstance(request, InstallModules):
            for module in request.modules:
                first, sync = self.replicas[module]
                self.link.shared_numbers = {id(tensor): number for number, tensor in enumerate(sync.tensors, first)}
        for call in getattr(request, "dropped", ()):
            self._module_of.pop(call, None)
        return request

    def _refresh(self, module: int) -> None:
        found = self.replicas.get(module)
        if found is None:
            return
        places, contents = found[1].pop_changes()
        if places:
            try:
                self.link.send(WriteTensors(0, module, places, contents))
            except BaseException:
                self.link.channel.is_broken = True  # the recorded contents differ from the worker's
                raise

    def handle_unsolicited(self, message: Any) -> None:
        """Apply what a module has written to its replicas; repeat output."""
        if not isinstance(message, WriteTensors):
            super().handle_unsolicited(message)
        elif message.module in self.replicas:
            self.replicas[message.module][1].apply_changes(message.places, message.tensors)

    # ── the model's tensors ────────────────────────────────────────────────────────────────────────────────────
    def ensure_shared(self, module: PlacedModule) -> bool:
        """Give the worker replicas of a module's tensors that can hold their contents."""
        for tensor in module.tensors:
            if tensor.device != module.shared_parameters.model_device:
                raise MisplacedTensor(f"a tensor of it is on {tensor.device}, its worker's on {self.address}")
        found = self.replicas.get(module.number)
        if found is not None and found[1].fits(module.tensors):
            found[1].tensors = list(module.tensors)
            return False
        module.shared_parameters.pool.flush_forgotten()
        sync, first = ReplicaSync(module.tensors), self._placed
        self._placed += len(module.tensors)
        request = InstallReplica(
            self.next_number(), module.number, first, sync.layouts, source_hashes(module.module), sync.known
        )  # fmt: skip
        reply = self.ask(request, f"take the tensors of {module.name}")
        if not isinstance(reply, Done):
            raise MisplacedTensor(
                f"the worker cannot take it: {getattr(reply, 'reason', reply)!s:.300}".partition("\n")[0]
            )
        self.replicas[module.number] = first, sync
        return True

    def release_module(self, module: PlacedModule) -> None:
        """Drop the replicas of a module that runs in the controller from now on."""
        if self.replicas.pop(module.number, None) is not None and not self.loss:
            with contextlib.suppress(InternalFault, WorkerError):  # the next call reports it
                self.ask(Forget(self.next_number(), [module.number], []), f"forget {module.name}")

    def forget_modules(self, modules: list[int]) -> None:
        """Forget modules of a deleted model."""
        for number in modules:
            self.replicas.pop(number, None)

    # ── its end ────────────────────────────────────────────────────────────────────────────────────────────────
    def _explain_kill(self) -> tuple[str, str]:
        contents = f"it held {describe_contents(self.contents)}" if self.contents else ""
        return contents, f"out of memory shows as SIGKILL: see the log of {self.address.place}; {LESS_MEMORY}"

    def _read_stacks(self) -> str:
        return self.process.stacks
