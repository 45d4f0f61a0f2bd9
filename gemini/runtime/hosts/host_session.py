"""A session: the process of a worker that serves a controller on another host.

    python -c "from gemini.runtime.hosts.host_session import main; main()" CONNECTION STACKS TERMS PARENT

The listener has met the controller and hands over the connection; TERMS is a pipe with the key and whatever else was
agreed. The process does what any worker does, with copies of the model's tensors: new contents come before a request,
and what a unit has written goes back before the reply.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from gemini.runtime.worker.worker_process import Server, configure_process, serve


def main() -> None:
    """Serve until told to stop."""
    connection, stacks, terms, parent = (int(one) for one in sys.argv[1:5])
    configure_process(stacks, parent)
    with os.fdopen(terms) as pipe:
        agreed = json.load(pipe)
    serve(lambda: _server(socket.socket(fileno=connection), agreed))


def _server(connection: socket.socket, agreed: dict[str, Any]) -> RemoteServer:
    from gemini.runtime.devices.registry import create_device
    from gemini.runtime.devices.remote_device import gpu_identity
    from gemini.runtime.transport.dist_p2p import P2PChannel
    from gemini.runtime.transport.remote_link import ThreadedRemoteLink
    from gemini.runtime.transport.tcp_channel import TcpChannel

    channel = TcpChannel(connection, bytes.fromhex(agreed["key"]), 1)
    gpus = gpu_identity(create_device(agreed["device"], agreed["back_end"])), agreed["gpu"]
    lane = P2PChannel(channel, 1, connection.getsockname()[0], agreed["timeout"], gpus)
    return RemoteServer(ThreadedRemoteLink(channel, lane, side=1))


class RemoteServer(Server):
    """Answers requests one by one, with tensors of its own."""

    def __init__(self, link: Any) -> None:
        super().__init__(link)
        self.calls = _calls(link.classes, self._tell)
        self._ledgers: dict[int, Any] = {}  # by unit
        self._numbers: dict[int, range] = {}  # of a unit's tensors
        self._unit_of: dict[int, int] = {}  # by call

    def _answer(self, request: Any, descriptors: list[int]) -> Any:
        from gemini.runtime.protocol import Backward, Forward

        reply = super()._answer(request, descriptors)
        if isinstance(request, Forward):
            self._unit_of = {call: unit for call, unit in self._unit_of.items() if call in self.calls.kept}
            self._unit_of[request.number] = request.unit
            self._tell(request.unit)
        elif isinstance(request, Backward):
            self._tell(self._unit_of.get(request.call, -1))
        return reply

    def _reply(self, request: Any, reply: Any) -> None:
        from gemini.runtime.protocol import Done, WriteTensors

        if not isinstance(request, WriteTensors):
            super()._reply(request, reply)
        elif not isinstance(reply, Done):
            raise RuntimeError(f"new contents of the model's tensors cannot be stored: {reply.reason}")

    def _tell(self, unit: int) -> None:
        """What a unit has written to its tensors."""
        from gemini.runtime.protocol import WriteTensors

        if unit in self._ledgers:
            places, contents = self._ledgers[unit].differing()
            if places:
                self.link.send(WriteTensors(0, unit, places, contents))

    def _carry_out(self, request: Any, descriptors: list[int]) -> Any:
        from gemini.runtime.protocol import Forget, InstallReplica, WriteTensors

        if isinstance(request, WriteTensors):
            if request.unit in self._ledgers:
                self._ledgers[request.unit].take(request.places, request.tensors)
            return None
        if isinstance(request, InstallReplica):
            return self._lodge(request)
        if isinstance(request, Forget):
            self.calls.forget(request.units)
            for unit in request.units:
                self._leave(unit)
            return None
        return super()._carry_out(request, descriptors)

    def _lodge(self, request: Any) -> None:
        """Make a unit's tensors; their numbers are what its module names."""
        from gemini.runtime.hosts.code_versions import find_differences
        from gemini.runtime.memory.replica_sync import ReplicaSync, build_replica
        from gemini.runtime.worker.side_effect_check import Refusal

        if different := find_differences(request.sources):
            raise Refusal(different)
        self._leave(request.unit)
        tensors = build_replica(request.homes, request.contents)
        self._numbers[request.unit] = range(request.first, request.first + len(tensors))
        self.link.homes.update(zip(self._numbers[request.unit], tensors, strict=True))
        self._ledgers[request.unit] = ReplicaSync(tensors)

    def _leave(self, unit: int) -> None:
        self._ledgers.pop(unit, None)
        for number in self._numbers.pop(unit, ()):
            self.link.homes.pop(number, None)


def _calls(classes: Any, tell: Callable[[int], None]) -> Any:
    from gemini.runtime.worker.module_server import ModuleServer

    class FarCalls(ModuleServer):
        """What is undone is told as well."""

        def undo(self, unit: int, call: int) -> None:
            super().undo(unit, call)
            tell(unit)

    return FarCalls(classes)


if __name__ == "__main__":
    main()
