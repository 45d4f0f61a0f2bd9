"""Link: messages with tensors between two processes.

A frame is plain data: kind and fields of the message, headers of its tensors and, where there are any, announcements
of new segments and classes. The fields of frequent messages are plain data; other values are pickled without their
tensors. Both processes belong to one run: a link uses a socket pair that the worker inherited, or a connection whose
frames are authenticated. Tensors of the model that live in shared memory are sent as a number.
"""

from __future__ import annotations

import marshal
import select
import threading
from typing import Any, ClassVar, NamedTuple

import torch

from gemini.runtime.devices.base import Device
from gemini.runtime.transport.channel import Channel, ChannelClosed
from gemini.runtime.transport.serialization import ClassTable, pack, unpack
from gemini.runtime.transport.tensor_transport import TensorTransport


class UnreadableMessage(NamedTuple):
    """Stands for a message that has arrived but cannot be rebuilt."""

    number: int
    reason: str


class Link:
    """One end. Any thread may send; one thread at a time may receive."""

    plain: ClassVar[dict[str, Any]] = {}  # message classes: plain fields, then a list of tensors

    def __init__(self, channel: Channel, side: int = 0) -> None:
        self.channel = channel
        self.transport = TensorTransport()
        self.classes = ClassTable(side)
        self._sending = threading.Lock()  # a frame may use what the one before announces
        self.shared_numbers: dict[int, int] = {}  # tensors in shared memory: id → number
        self.shared_tensors: dict[int, torch.Tensor] = {}  # the same on the receiving side, by number

    def set_device(self, device: Device) -> None:
        """Set the device on which the worker computes."""
        self.transport = TensorTransport(device)

    @property
    def has_more(self) -> bool:
        """Whether a message has arrived that polling would miss."""
        return self.channel.has_more

    def fileno(self) -> int:
        """Return the descriptor to poll for messages."""
        return self.channel.fileno()

    def has_room(self, timeout_ms: int) -> bool:
        """Whether a message can be sent without waiting for the receiver."""
        room = select.poll()
        room.register(self.channel.fileno(), select.POLLOUT)
        return bool(room.poll(timeout_ms))

    def send(self, message: Any, descriptors: tuple[int, ...] = (), wait: bool = True) -> bool:
        """Send a value and descriptors; raise what pickling raises before anything is sent.

        With `wait=False` nothing is sent, and False is returned, while another thread sends a message.
        """
        kind = type(message).__name__
        if kind in self.plain:
            fields, found = message[:-1], message[-1]
        else:
            body, found = pack(message, self.classes)
            kind, fields = "", (getattr(message, "number", 0), body)
        headers: list[Any] = []
        try:
            for tensor in found:
                headers.append(None if tensor is None else self._header(tensor))
            if not self._sending.acquire(blocking=wait):
                return False
            try:
                self._send(kind, fields, headers, descriptors)
            finally:
                self._sending.release()
        except ChannelClosed:
            raise
        except BaseException:
            self.transport.take_back(headers)
            raise
        return True

    def _send(self, kind: str, fields: tuple[Any, ...], headers: list[Any], descriptors: tuple[int, ...]) -> None:
        if not self.transport.has_updates and not self.classes.has_updates:
            frame = marshal.dumps((kind, fields, headers))
            self.transport.device.finish()
            self._transmit(frame, headers, descriptors)
            return
        new_classes = self.classes.unannounced()
        announcement, released = self.transport.unannounced(), self.transport.pop_released()
        try:
            frame = marshal.dumps((kind, fields, headers, announcement.plain, released, new_classes))
        except ValueError:
            self.transport.restore_released(released)
            raise
        self.transport.device.finish()
        self._transmit(frame, headers, (*announcement.descriptors, *descriptors))
        self.transport.mark_announced(announcement)
        self.classes.mark_announced(new_classes)

    def _transmit(self, frame: bytes, headers: list[Any], descriptors: tuple[int, ...]) -> None:  # noqa: ARG002
        self.channel.send(frame, descriptors)

    def receive(self, timeout: float | None = None) -> tuple[Any, list[int]] | None:
        """Return the next message and its descriptors; None if nothing arrives in time."""
        found = self.channel.receive(timeout)
        if found is None:
            return None
        frame, descriptors = found
        kind, fields, headers, *updates = marshal.loads(frame)
        if updates:
            segments, released, new_classes = updates
            descriptors = self.transport.open_segments(segments, descriptors)
            self.transport.release(released)
            self.classes.add_announced(new_classes)
        self.transport.take_in(headers)
        tensors = [None if header is None else self._tensor(header) for header in headers]
        message = self.plain[kind](*fields, tensors) if kind else self._unpack(fields[0], fields[1], tensors)
        return message, descriptors

    def _unpack(self, number: int, body: bytes, tensors: list[Any]) -> Any:
        try:
            return unpack(body, tensors, self.classes)
        except Exception as error:  # whatever user classes raise when they are rebuilt
            return UnreadableMessage(number, f"{type(error).__name__}: {error}")

    def _header(self, tensor: torch.Tensor) -> tuple[int, Any]:
        number = self.shared_numbers.get(id(tensor))
        return self.transport.write(tensor) if number is None else (-1, number)

    def _tensor(self, header: tuple[int, Any]) -> torch.Tensor:
        return self.shared_tensors[header[1]] if header[0] < 0 else self.transport.read(header)

    def close(self) -> None:
        """Close the connection; memory is freed with its last tensor."""
        self.channel.close()
