"""Host session: the process of a worker that serves a controller on another host.

    python -c "from gemini.runtime.hosts.host_session import main; main()" STACKS TERMS PARENT

The supervisor of the host starts it; TERMS is a pipe with what it must know: where to meet the controller, the key of
the connection, its own address, device and time limit. The process works like any worker, on replicas of the model's
tensors: new contents arrive before a request, and what a module has written is sent before the reply.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from gemini.runtime.worker.worker_process import Server, configure_process, serve

_ENDING = 2.0  # seconds for the last messages to leave


def main() -> None:
    """Serve until stopped."""
    stacks, terms, parent = (int(one) for one in sys.argv[1:4])
    configure_process(stacks, parent)
    with os.fdopen(terms) as pipe:
        agreed = json.load(pipe)
    serve(lambda: _server(agreed), stacks)


def _server(agreed: dict[str, Any]) -> RemoteServer:
    from gemini.runtime.devices.cpu import Cpu
    from gemini.runtime.devices.registry import create_device
    from gemini.runtime.devices.remote_device import gpu_identity
    from gemini.runtime.transport.dist_p2p import P2PChannel
    from gemini.runtime.transport.gloo_channel import GlooChannel
    from gemini.runtime.transport.gloo_pair import GlooPair, MeetingPoint
    from gemini.runtime.transport.remote_link import ThreadedRemoteLink

    device = create_device(agreed["device"], agreed["back_end"])
    obstacle = device.obstacle() or ""
    store = MeetingPoint(*agreed["meeting"]).join(agreed["timeout"])
    store.set("worker", json.dumps({"obstacle": obstacle, "gpu": "" if obstacle else gpu_identity(device)}))
    if obstacle:
        os._exit(0)
    pair = GlooPair(store, 1, agreed["host"], agreed["timeout"])
    channel = GlooChannel(pair, bytes.fromhex(agreed["key"]))
    p2p = P2PChannel(channel, pair, (gpu_identity(device), agreed["gpu"]))
    return RemoteServer(ThreadedRemoteLink(channel, p2p, 1, Cpu()))


class RemoteServer(Server):
    """Answers requests one by one, on its own replicas."""

    def __init__(self, link: Any) -> None:
        super().__init__(link)
        self.modules = _module_server(link.classes, self._send_changes)
        self._replicas: dict[int, Any] = {}  # by module
        self._numbers: dict[int, range] = {}  # of a module's tensors
        self._module_of: dict[int, int] = {}  # by call
        self._program_of: dict[int, int] = {}  # by kind of step
        self.optimizers = _replica_optimizers()
        self._last = 0  # the program of the last step

    def serve(self) -> None:
        """Answer until Stop, and wait until the last messages have left."""
        super().serve()
        self.link.drain(_ENDING)

    def _answer(self, request: Any, descriptors: list[int]) -> Any:
        from gemini.runtime.protocol import Backward, Forward
        from gemini.runtime.step_messages import AbortStep, Step, Tasks, stages_module

        if isinstance(request, Tasks):
            self._program_of[request.key] = request.program
        reply = super()._answer(request, descriptors)
        if isinstance(request, Forward):
            self._module_of = {call: module for call, module in self._module_of.items() if call in self.modules.graphs}
            self._module_of[request.number] = request.module
            self._send_changes(request.module)
        elif isinstance(request, Backward):
            self._send_changes(self._module_of.get(request.call, 0))
        elif isinstance(request, Step):
            self._last = self._program_of[request.key]
            self._send_changes(stages_module(self._last))
        elif isinstance(request, AbortStep):  # what an undone step has written is as before
            self._send_changes(stages_module(self._last))
        return reply

    def _reply(self, request: Any, reply: Any) -> None:
        from gemini.runtime.protocol import Done, WriteTensors
        from gemini.runtime.step_messages import UpdateWeights

        if isinstance(request, UpdateWeights):
            return  # weights are compared before they are used
        if not isinstance(request, WriteTensors):
            super()._reply(request, reply)
        elif not isinstance(reply, Done):
            raise RuntimeError(f"new contents of the model's tensors cannot be stored: {reply.reason}")

    def _send_changes(self, module: int) -> None:
        """Send what a module has written to its tensors."""
        from gemini.runtime.protocol import WriteTensors

        if module in self._replicas:
            places, contents = self._replicas[module].pop_changes()
            if places:
                self.link.send(WriteTensors(0, module, places, contents))

    def _execute(self, request: Any, descriptors: list[int]) -> Any:
        from gemini.runtime.protocol import Forget, InstallReplica, WriteTensors
        from gemini.runtime.step_messages import CompareWeights, RetirePrograms, UpdateWeights, stages_module

        if isinstance(request, RetirePrograms):
            self.optimizers.forget(request.programs)
            for program in request.programs:
                self._drop_replica(stages_module(program))
        if isinstance(request, UpdateWeights):
            gradients = self.steps.programs[request.program].replica_gradients
            self.optimizers.update(request, self.link.shared_tensors, gradients)
            return None
        if isinstance(request, CompareWeights):
            return self._compare_weights(request)
        if isinstance(request, WriteTensors):
            if request.module in self._replicas:
                self._replicas[request.module].apply_changes(request.places, request.tensors)
            return None
        if isinstance(request, InstallReplica):
            return self._install_replica(request)
        if isinstance(request, Forget):
            self.modules.forget(request.modules)
            for module in request.modules:
                self._drop_replica(module)
            return None
        return super()._execute(request, descriptors)

    def _compare_weights(self, request: Any) -> Any:
        """Compare the replicas of a program's stages with the controller's tensors."""
        from gemini.runtime.step_messages import ComparedWeights, stages_module

        sync = self._replicas[stages_module(request.program)]
        differ = [at for at, (own, other) in enumerate(zip(sync.hashes(), request.hashes, strict=True)) if own != other]
        sync.accept(sorted(set(range(len(sync.first))) - set(differ)))
        return ComparedWeights(request.number, differ)

    def _install_replica(self, request: Any) -> None:
        """Create the tensors of a module under the numbers that the module refers to."""
        from gemini.runtime.hosts.code_versions import find_differences
        from gemini.runtime.memory.replica_sync import ReplicaSync, build_replica
        from gemini.runtime.worker.side_effect_check import Refusal

        if different := find_differences(request.sources):
            raise Refusal(different)
        self._drop_replica(request.module)
        tensors = build_replica(request.layouts, request.contents)
        self._numbers[request.module] = range(request.first, request.first + len(tensors))
        self.link.shared_tensors.update(zip(self._numbers[request.module], tensors, strict=True))
        self._replicas[request.module] = ReplicaSync(tensors)

    def _drop_replica(self, module: int) -> None:
        self._replicas.pop(module, None)
        for number in self._numbers.pop(module, ()):
            self.link.shared_tensors.pop(number, None)


def _replica_optimizers() -> Any:
    from gemini.runtime.worker.replica_update import ReplicaOptimizers

    return ReplicaOptimizers()


def _module_server(classes: Any, send_changes: Callable[[int], None]) -> Any:
    from gemini.runtime.worker.module_server import ModuleServer

    class RemoteModuleServer(ModuleServer):
        """Sends what is undone as well."""

        def undo(self, module: int, call: int) -> None:
            super().undo(module, call)
            send_changes(module)

    return RemoteModuleServer(classes)


if __name__ == "__main__":
    main()
