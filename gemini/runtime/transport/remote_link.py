"""Remote link: a link between hosts. Frames use the channel, tensor contents a point-to-point channel.

A tensor on the model's device arrives on the worker's device and vice versa; one in main memory stays in main memory.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from gemini.runtime.devices.base import Device, Segment
from gemini.runtime.devices.cpu import Cpu
from gemini.runtime.transport import tensor_header
from gemini.runtime.transport.channel import Channel, ChannelClosed
from gemini.runtime.transport.dist_p2p import P2PChannel
from gemini.runtime.transport.link import Link
from gemini.runtime.transport.shm_pool import Slab
from gemini.runtime.transport.tensor_transport import DeviceBuffers, TensorTransport


class SendBuffers:
    """The sender's side of a device: bytes wait here until the frame with their headers is sent."""

    def __init__(self, p2p: P2PChannel, device: Device) -> None:
        self.p2p, self.device = p2p, device
        self._waiting: dict[int, torch.Tensor] = {}
        self._numbers = itertools.count()

    has_updates = False  # no memory is shared

    def take(self, size: int) -> Slab:
        """Return room for a tensor."""
        number = next(self._numbers)
        self._waiting[number] = torch.empty(size, dtype=torch.uint8, device=self.p2p.memory(self.device.where))
        return Slab(number, 0, size)

    def view(self, slab: Slab, size: int) -> torch.Tensor:  # noqa: ARG002
        """Return the buffer, to write."""
        return self._waiting[slab.segment]

    def pop(self, slab: Slab) -> torch.Tensor:
        """Return a buffer, to be sent."""
        return self._waiting.pop(slab.segment)

    def release(self, slabs: list[Slab]) -> None:
        """Drop buffers that will not be sent."""
        for slab in slabs:
            self._waiting.pop(slab.segment, None)

    def unannounced(self) -> list[Segment]:
        """Return nothing: no memory is shared."""
        return []

    def trim(self) -> None:
        """Do nothing: no memory is shared."""

    def forget(self) -> None:
        """Drop all buffers."""
        self._waiting = {}


class ReceiveBuffers:
    """The receiver's side of a device."""

    def __init__(self, p2p: P2PChannel, device: Device) -> None:
        self.p2p, self.device, self.where = p2p, device, device.where
        self.is_main = self.where.type == "cpu"
        self._arrived: dict[int, torch.Tensor] = {}  # by segment

    pending_releases = 0
    has_updates = False  # no memory is shared

    def prepare(self, slab: Slab) -> torch.Tensor:
        """Return memory for the bytes of a slab."""
        memory = torch.empty(slab.size, dtype=torch.uint8, device=self.p2p.memory(self.device.where))
        self._arrived[slab.segment] = memory
        return memory

    def view(self, slab: Slab, size: int) -> torch.Tensor:  # noqa: ARG002
        """Return the bytes of a slab that have arrived."""
        return self._arrived.pop(slab.segment).to(self.device.where)

    def pop_released(self) -> list[tuple[int, int, int]]:
        """Return nothing: no memory is shared."""
        return []

    def restore_released(self, slabs: list[tuple[int, int, int]]) -> None:
        """Do nothing: no memory is shared."""

    def forget(self) -> None:
        """Drop what has arrived."""
        self._arrived = {}


class RemoteTensorTransport(TensorTransport):
    """Both directions of one end, without shared memory."""

    shares_memory = False

    def __init__(self, device: Device, p2p: P2PChannel) -> None:
        super().__init__(device)
        buffers_by_device: list[Any] = [
            DeviceBuffers(buffers.device, *_ends(p2p, buffers.device)) for buffers in self.buffers
        ]
        self.buffers, self.borrowed = buffers_by_device, None

        self._p2p = p2p

    def transmit(self, headers: list[tuple[int, Any] | None]) -> None:
        """Send the contents of the tensors of a frame that has been sent."""
        found = [self._pool(at).pop(slab) for at, slab in _slabs(headers)]
        if found:
            self._p2p.send(found)

    def take_in(self, headers: list[tuple[int, Any] | None]) -> None:
        """Receive the contents of the tensors of a frame that has arrived, all at once."""
        try:
            memory = [self._mapped(at).prepare(slab) for at, slab in _slabs(headers)]
        except BaseException:
            self._p2p.channel.is_broken = True
            raise
        if memory:
            self._p2p.receive(memory)

    def _pool(self, at: int) -> Any:
        return self.buffers[at].pool

    def _mapped(self, at: int) -> Any:
        return self.buffers[at].mapped


def _slabs(headers: list[tuple[int, Any] | None]) -> Iterator[tuple[int, Slab]]:
    """Yield the slabs of headers, with the places of their devices, in the order in which they travel."""
    for header in headers:
        if header is not None and header[0] >= 0:
            yield from ((header[0], Slab(*slab)) for slab in tensor_header.slabs_of(header[1]))


def _ends(p2p: P2PChannel, device: Device) -> tuple[Any, Any]:
    return SendBuffers(p2p, device), ReceiveBuffers(p2p, device)


class RemoteLink(Link):
    """A link whose tensors use a point-to-point channel."""

    transport: RemoteTensorTransport

    def __init__(self, channel: Channel, p2p: P2PChannel, side: int = 0) -> None:
        super().__init__(channel, side)
        self._p2p = p2p
        self.set_device(Cpu())

    def set_device(self, device: Device) -> None:
        """Set the device of this end's tensors, on which tensors from the other end's device arrive."""
        self.transport = RemoteTensorTransport(device, self._p2p)

    def _transmit(self, frame: bytes, headers: list[Any], descriptors: tuple[int, ...]) -> None:
        self.channel.send(frame, descriptors)
        self.transport.transmit(headers)


class ThreadedRemoteLink(RemoteLink):
    """A worker's end of a remote link: it receives and sends in threads, so that transfers overlap with computation."""

    def __init__(self, channel: Channel, p2p: P2PChannel, side: int, device: Device) -> None:
        super().__init__(channel, p2p, side)
        self.set_device(device)
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._count = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)  # of messages that have arrived, to poll
        self._leaving: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._queued, self._gone = 0, 0  # messages that have entered and left the outbox
        threading.Thread(target=self._receive_all, name="gemini-inbox", daemon=True).start()
        threading.Thread(target=self._send_all, name="gemini-outbox", daemon=True).start()

    @property
    def has_more(self) -> bool:
        """Polling misses nothing."""
        return False

    def fileno(self) -> int:
        """Return the descriptor to poll: the channel itself is read by the thread."""
        return self._count

    def receive(self, timeout: float | None = None) -> tuple[Any, list[int]] | None:
        """Return the next message; None if none arrives in time."""
        try:
            found = self._arrived.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(found, BaseException):
            self._arrived.put(found)  # for later calls; the descriptor stays readable
            raise found
        os.eventfd_read(self._count)
        message: tuple[Any, list[int]] = found
        return message

    def _receive_all(self) -> None:
        try:
            while True:
                self._put(super().receive())
        except BaseException as error:
            self._put(error)

    def _put(self, found: Any) -> None:
        self._arrived.put(found)
        os.eventfd_write(self._count, 1)

    def has_room(self, timeout_ms: int) -> bool:  # noqa: ARG002
        """Messages wait in memory."""
        return True

    def drain(self, seconds: float) -> None:
        """Wait until all messages have been sent, at most so long."""
        deadline = time.monotonic() + seconds
        while self._queued > self._gone and not self.channel.is_broken and time.monotonic() < deadline:
            time.sleep(0.001)

    def _transmit(self, frame: bytes, headers: list[Any], descriptors: tuple[int, ...]) -> None:
        if self.channel.is_broken:
            raise ChannelClosed("it is broken")
        if not headers and self._queued == self._gone:  # a short message needs no other thread
            super()._transmit(frame, headers, descriptors)
            return
        self._queued += 1
        self._leaving.put((frame, headers, descriptors))

    def _send_all(self) -> None:
        try:
            while True:
                super()._transmit(*self._leaving.get())
                self._gone += 1
        except BaseException as error:
            self.channel.is_broken = True
            self._put(error)
