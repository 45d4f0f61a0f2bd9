"""The far link: a link between hosts. Frames go over the channel, the contents of their tensors through a lane.

A tensor of the model's device arrives on the worker's, and the other way round; one in main memory stays there.
"""

from __future__ import annotations

import itertools
import queue
import threading
from typing import Any

import torch

from gemini.runtime.devices.base import Device, Segment
from gemini.runtime.devices.cpu import Cpu
from gemini.runtime.transport import tensor_header
from gemini.runtime.transport.channel import Channel
from gemini.runtime.transport.dist_p2p import P2PChannel
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.shm_pool import Slab
from gemini.runtime.transport.tensor_transport import DeviceBuffers, TensorTransport


class SendBuffers:
    """The sender's side of a line: bytes wait here until the frame that names them is sent."""

    def __init__(self, lane: P2PChannel, device: Device) -> None:
        self.lane, self.device = lane, device
        self._waiting: dict[int, torch.Tensor] = {}
        self._numbers = itertools.count()

    has_updates = False  # nothing is shared

    def take(self, size: int) -> Slab:
        """Room for a tensor."""
        number = next(self._numbers)
        self._waiting[number] = torch.empty(size, dtype=torch.uint8, device=self.lane.memory(self.device.where))
        return Slab(number, 0, size)

    def view(self, slab: Slab, size: int) -> torch.Tensor:  # noqa: ARG002
        """To write."""
        return self._waiting[slab.segment]

    def ship(self, slab: Slab) -> None:
        """Send it."""
        self.lane.send(self._waiting.pop(slab.segment))

    def release(self, slabs: list[Slab]) -> None:
        """They will not be sent."""
        for slab in slabs:
            self._waiting.pop(slab.segment, None)

    def news(self) -> list[Segment]:
        """Nothing is shared."""
        return []

    def trim(self) -> None:
        """Nothing is shared."""

    def forget(self) -> None:
        """Nothing is shared."""
        self._waiting = {}


class ReceiveBuffers:
    """The receiver's side of a line."""

    def __init__(self, lane: P2PChannel, device: Device) -> None:
        self.lane, self.device, self.where = lane, device, device.where
        self.is_main = self.where.type == "cpu"

    has_updates = False  # nothing is shared

    def look(self, slab: Slab, size: int) -> torch.Tensor:  # noqa: ARG002
        """The bytes that come next."""
        try:
            found = torch.empty(size, dtype=torch.uint8, device=self.lane.memory(self.device.where))
        except BaseException:
            self.lane.channel.is_broken = True
            raise
        self.lane.receive(found)
        return found.to(self.device.where)

    def released(self) -> list[tuple[int, int, int]]:
        """Nothing is shared."""
        return []

    def retake(self, slabs: list[tuple[int, int, int]]) -> None:
        """Nothing is shared."""

    def forget(self) -> None:
        """Nothing is shared."""


class RemoteTensorTransport(TensorTransport):
    """Both directions of one end, where no memory is shared."""

    def __init__(self, device: Device, lane: P2PChannel) -> None:
        super().__init__(device)
        lines: list[Any] = [DeviceBuffers(line.device, *_ends(lane, line.device)) for line in self.lines]
        self.lines, self.borrowed = lines, None

    def ship(self, headers: list[tuple[int, Any] | None]) -> None:
        """The frame has been sent: now the contents of its tensors."""
        for header in headers:
            if header is not None and header[0] >= 0:
                pool: Any = self.lines[header[0]].pool
                for slab in tensor_header.slabs_of(header[1]):
                    pool.ship(Slab(*slab))


def _ends(lane: P2PChannel, device: Device) -> tuple[Any, Any]:
    return SendBuffers(lane, device), ReceiveBuffers(lane, device)


class RemoteLink(Link):
    """A link whose tensors go through a lane."""

    transport: RemoteTensorTransport

    def __init__(self, channel: Channel, lane: P2PChannel, side: int = 0) -> None:
        super().__init__(channel, side)
        self._lane = lane
        self.set_device(Cpu())

    def set_device(self, device: Device) -> None:
        """The tensors of this end are on `device`; what comes from the other end's device comes there."""
        self.transport = RemoteTensorTransport(device, self._lane)

    def _send(self, kind: str, fields: tuple[Any, ...], headers: list[Any], descriptors: tuple[int, ...]) -> None:
        super()._send(kind, fields, headers, descriptors)
        self.transport.ship(headers)


class ThreadedRemoteLink(RemoteLink):
    """A link that takes what comes while its owner is at work: whoever sends never waits for that work."""

    def __init__(self, channel: Channel, lane: P2PChannel, side: int = 0) -> None:
        super().__init__(channel, lane, side)
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._take_all, name="gemini-inbox", daemon=True).start()

    def receive(self, timeout: float | None = None) -> tuple[Any, list[int]] | None:
        """The next message; None if none comes in time."""
        try:
            found = self._arrived.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(found, BaseException):
            self._arrived.put(found)  # for whoever asks next
            raise found
        message: tuple[Any, list[int]] = found
        return message

    def _take_all(self) -> None:
        try:
            while True:
                self._arrived.put(super().receive())
        except BaseException as error:
            self._arrived.put(error)
