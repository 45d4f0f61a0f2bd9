"""Remote worker: the handle of a worker on another host. Requested like any other, but it shares no memory.

It has replicas of the tensors of its modules and stages. Before each forward, backward and step the controller sends
what the script has written since; what the worker writes comes back before the reply: see
`gemini.runtime.memory.replica_sync`.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from gemini.config.host_address import worker_at
from gemini.errors import ConfigError, Fault, WorkerError
from gemini.runtime.devices.registry import class_path, create_device
from gemini.runtime.devices.remote_device import RemoteDevice, gpu_identity
from gemini.runtime.hosts.code_versions import source_hashes, version_differences, versions
from gemini.runtime.hosts.host_agent import RemoteProcess
from gemini.runtime.hosts.host_cluster import HostCluster
from gemini.runtime.memory.replica_sync import ReplicaSync
from gemini.runtime.memory.shared_layout import MisplacedTensor
from gemini.runtime.memory.shared_parameters import PlacedModule, SharedParameters
from gemini.runtime.pool.worker_failure import LESS_MEMORY, describe_contents, describe_held
from gemini.runtime.pool.worker_handle import START_TIMEOUT, InternalFault, WorkerHandle, track_worker
from gemini.runtime.protocol import (
    Backward,
    Done,
    Forget,
    Forward,
    GradientBucket,
    InstallModules,
    InstallReplica,
    Outputs,
    WriteTensors,
)
from gemini.runtime.step_messages import (
    CompareWeights,
    RetirePrograms,
    Stages,
    Step,
    Tasks,
    UpdateWeights,
    stages_module,
)
from gemini.runtime.transport.channel import Channel, ChannelClosed
from gemini.runtime.transport.dist_p2p import P2PChannel
from gemini.runtime.transport.gloo_channel import GlooChannel
from gemini.runtime.transport.gloo_pair import GlooPair
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.remote_link import RemoteLink


class RemoteWorker(WorkerHandle):
    """One worker, named as in a device mapping; the model is on a device of this host."""

    is_remote = True
    output_location = "on its host"
    process: RemoteProcess  # type: ignore[assignment]
    is_stopped = False  # not known of a process on another host

    def __init__(  # noqa: PLR0917
        self,
        index: int,
        timeout: float,
        team: list[WorkerHandle],
        names: Sequence[str],
        home: str,
        cluster: HostCluster,
    ) -> None:
        """`names`: of all workers, as in a device mapping; `home`: the device of the model on this host."""
        self._model_device, self.cluster = home, cluster
        own = worker_at(names[index])
        others = [worker_at(name) for name in names]
        self._sharing = sum(one is not None and own is not None and one.host == own.host for one in others)
        self.replicas: dict[int, tuple[int, ReplicaSync]] = {}  # by module: number of the first tensor
        self._module_of: dict[int, int] = {}  # by call with a retained graph
        self._program_of: dict[int, int] = {}  # by kind of step
        self._updated: set[int] = set()  # programs whose weights it has optimized, and which have not been compared
        self._buckets: list[GradientBucket] = []  # of gradients that have arrived before their reply
        super().__init__(index, 0, timeout, team, names[index])

    # ── its start ──────────────────────────────────────────────────────────────────────────────────────────────
    def _start(self, threads: int, device: str) -> None:  # noqa: ARG002
        """Start the process; `await_ready` waits for it, so that all workers start at the same time."""
        address = worker_at(device)
        assert address is not None
        self.address = address
        self.device, self.stacks = RemoteDevice(device, create_device(self._model_device)), -1
        agent, said = self.cluster.supervise(self.index, device)
        different = version_differences(versions(), said["versions"], f"host {address.host}")
        if different:
            agent.release()
            raise ConfigError([Fault(f"other versions: {different}", "install the same versions on all hosts")])
        self.host, key = said["host"], secrets.token_bytes(32)
        self._threads = max(1, min(torch.get_num_threads(), said["cores"] // self._sharing))
        meeting = self.cluster.meeting()
        terms = {
            "meeting": meeting, "key": key.hex(), "device": address.device, "back_end": class_path(address.device),
            "timeout": self._start_timeout, "gpu": gpu_identity(self.device),
        }  # fmt: skip
        answer = agent.call("start", self._start_timeout, threads=self._threads, terms=terms)
        self._path, self._key = answer["path"], key
        self._store = self.cluster.join(meeting)
        ours, _ = Channel.pair()
        self.link = Link(Channel(ours))  # until it is up
        self.process = RemoteProcess(agent, answer["pid"], self._wake)
        track_worker(self)
        self.team.append(self)

    def _wake(self) -> None:
        """Close the connection of a worker that has ended, or is lost: gloo does not notice a cut link."""
        channel = self.link.channel
        with contextlib.suppress(OSError):
            channel.connection.shutdown(socket.SHUT_RDWR)
        if isinstance(channel, GlooChannel):
            channel.ends.close()

    def await_ready(self) -> None:
        """Connect to the process, and wait until it is up."""
        deadline = time.monotonic() + self._start_timeout
        while not self._store.check(["worker"]):
            if self.process.poll() is not None:
                raise self.report_death()
            if time.monotonic() > deadline:
                raise self.report_hang(self._start_timeout)
            time.sleep(0.01)
        said = json.loads(self._store.get("worker"))
        if said["obstacle"]:
            raise ConfigError([Fault(
                f"device {self.address.device!r} of {self.address.host}: {said['obstacle']}",
                "map the worker to a device of that host",
            )])  # fmt: skip
        try:
            pair = GlooPair(self._store, 0, self.cluster.host, self._start_timeout)
            channel = GlooChannel(pair, self._key)
            p2p = P2PChannel(channel, pair, (gpu_identity(self.device), said["gpu"]))
        except (ChannelClosed, RuntimeError):
            raise self.report_death() from None
        self.link.close()
        self.link = RemoteLink(channel, p2p)
        self._say_hello(self._threads, self._path, self.address.device)
        super().await_ready()

    @property
    def _start_timeout(self) -> float:
        return max(self.timeout, START_TIMEOUT)

    @property
    def title(self) -> str:
        """With its host."""
        return f"worker {self.index} (process {self.process.pid} on {self.address.host})"

    # ── asking ─────────────────────────────────────────────────────────────────────────────────────────────────
    def ask(self, request: Any, what: str, descriptors: tuple[int, ...] = (), timeout: float = 0.0) -> Any:
        """Send a request and wait for its reply."""
        reply = super().ask(request, what, descriptors, timeout)
        if not isinstance(reply, Outputs) or not any(reply.differentiable):  # no backward follows
            self._module_of.pop(getattr(reply, "number", 0), None)
        return reply

    def transmit(self, request: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Send the changes of tensors that a request relies on, then the request."""
        self.link.shared_numbers = {}  # a parameter among the arguments travels by value: replicas belong to one module
        self._prepare(request)
        super().transmit(request, descriptors)

    def _prepare(self, request: Any) -> None:
        if isinstance(request, Forward):
            self._module_of[request.number] = request.module
            self._refresh(request.module)
        elif isinstance(request, Backward):
            self._refresh(self._module_of.get(request.call, 0))
        elif isinstance(request, InstallReplica):
            self._module_of = {call: one for call, one in self._module_of.items() if one in self.replicas}
        elif isinstance(request, Step):
            self._refresh(stages_module(self._program_of[request.key]))
            return  # its `dropped` are steps
        elif isinstance(request, Tasks):
            self._program_of[request.key] = request.program
        elif isinstance(request, RetirePrograms):
            self.forget_modules([stages_module(program) for program in request.programs])
        elif isinstance(request, (InstallModules, Stages)):
            modules = request.modules if isinstance(request, InstallModules) else [stages_module(request.program)]
            for module in modules:
                first, sync = self.replicas[module]
                self.link.shared_numbers = {id(tensor): number for number, tensor in enumerate(sync.tensors, first)}
        for call in getattr(request, "dropped", ()):
            self._module_of.pop(call, None)

    # ── weights that it optimizes itself ───────────────────────────────────────────────────────────────────────
    def update_weights(self, request: UpdateWeights) -> None:
        """Send it a step of the optimizer."""
        with self.sending:
            self._updated.add(request.program)
            self.transmit(request)

    def is_updated(self, program: int) -> bool:
        """Whether its weights of a program's stages may differ from those of this process."""
        return program in self._updated

    def compare_weights(self, program: int) -> CompareWeights:
        """Return the request to compare them."""
        sync = self.replicas[stages_module(program)][1]
        return CompareWeights(self.next_number(), program, sync.hashes())

    def correct_weights(self, program: int, places: list[int] | None) -> None:
        """Send what differs; None: all."""
        with self.sending:
            sync = self.replicas[stages_module(program)][1]
            self._write(stages_module(program), [*range(len(sync.first))] if places is None else places)

    def note_compared(self, program: int) -> None:
        """Note that its weights are those of this process."""
        sync = self.replicas[stages_module(program)][1]
        sync.accept(range(len(sync.first)))
        self._updated.discard(program)

    def _refresh(self, module: int) -> None:
        found = self.replicas.get(module)
        if found is None:
            return
        if -module in self._updated:  # it has not been compared
            self._write(module, [*range(len(found[1].first))])
            self.note_compared(-module)
            return
        self._write(module, found[1].pop_changes()[0])

    def _write(self, module: int, places: list[int]) -> None:
        contents = self.replicas[module][1].contents(places)
        if places:
            try:
                self.link.send(WriteTensors(0, module, places, contents))
            except BaseException:
                self.link.channel.is_broken = True  # the recorded contents differ from the worker's
                raise

    def handle_unsolicited(self, message: Any) -> None:
        """Apply what a module has written to its replicas; keep early gradients; repeat output."""
        if isinstance(message, GradientBucket):
            self._buckets.append(message)
        elif not isinstance(message, WriteTensors):
            super().handle_unsolicited(message)
        elif message.module in self.replicas:
            self.replicas[message.module][1].apply_changes(message.places, message.tensors)

    def pop_gradients(self, step: int) -> dict[tuple[int, int], torch.Tensor]:
        """Return the gradients of a step that have arrived before its reply; drop those of failed steps."""
        found, self._buckets = [one for one in self._buckets if one.step == step], []
        return {key: tensor for one in found for key, tensor in zip(one.keys, one.tensors, strict=True)}

    # ── the model's tensors ────────────────────────────────────────────────────────────────────────────────────
    def ensure_shared(self, module: PlacedModule) -> bool:
        """Give the worker replicas of a module's tensors that can hold their contents."""
        for tensor in module.tensors:
            if tensor.device != module.shared_parameters.model_device:
                raise MisplacedTensor(f"a tensor of it is on {tensor.device}, its worker's on {self.address}")
        sources = source_hashes(module.module)
        return self._ensure_replica(module.number, module.tensors, module.shared_parameters, sources, module.name)

    def ensure_stages_shared(self, program: int, tensors: list[torch.Tensor], shared: SharedParameters) -> bool:
        """Give the worker replicas of the tensors of its stages, each once."""
        own = [*{id(tensor): tensor for tensor in tensors}.values()]
        return self._ensure_replica(stages_module(program), own, shared, {}, "its stages")

    def stage_numbers(self, program: int) -> dict[int, int]:
        """Return the numbers of the tensors of the stages of a program, by identity."""
        first, sync = self.replicas[stages_module(program)]
        return {id(tensor): number for number, tensor in enumerate(sync.tensors, first)}

    def _ensure_replica(
        self, number: int, tensors: list[torch.Tensor], shared: SharedParameters, sources: dict[str, str], name: str
    ) -> bool:
        found = self.replicas.get(number)
        if found is not None and found[1].fits(tensors):
            found[1].tensors = list(tensors)
            return False
        shared.pool.flush_forgotten()
        sync, first = ReplicaSync(tensors), shared.pool.number_tensors(len(tensors))
        request = InstallReplica(self.next_number(), number, first, sync.layouts, sources, sync.known)
        reply = self.ask(request, f"take the tensors of {name}")
        if not isinstance(reply, Done):
            raise MisplacedTensor(
                f"the worker cannot take it: {getattr(reply, 'reason', reply)!s:.300}".partition("\n")[0]
            )
        self.replicas[number] = first, sync
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
        return contents, f"out of memory shows as SIGKILL: see the kernel log of {self.address.host}; {LESS_MEMORY}"

    def report_death(self) -> WorkerError:
        """End the pool after the death of this worker, or the loss of its host."""
        if not self.loss and self.process.lost:
            where = f"host {self.address.host} is lost: {self.process.lost}"
            return self._lose(
                f"{self.title}: {where}; its last action: {self.last}; {describe_held(self.contents)}\n"
                "    → check its network and power; the script continues on this host where the model fits"
            )
        return super().report_death()

    def _read_stacks(self) -> str:
        return self.process.stacks
