"""The link: messages with tensors in them, from one process to the other.

A frame is plain data: the message's kind and fields, the headers of its tensors and, where there are any, the news
about slabs and classes. Frequent messages are such data but for their tensors; any other value is pickled, with its
tensors taken out. Both processes are ours and of one run: a link is made over a socket pair that a worker inherits, or
a connection whose every frame is proven, and never reads from anything else. Tensors of the model that live in shared
memory are only named.
"""

from __future__ import annotations

import marshal
import threading
from typing import Any, ClassVar, NamedTuple

import torch

from gemini.runtime.devices.base import Device
from gemini.runtime.transport.channel import Channel, ChannelClosed
from gemini.runtime.transport.serialization import ClassTable, pack, unpack
from gemini.runtime.transport.tensor_transport import TensorTransport


class UnreadableMessage(NamedTuple):
    """In the place of a message that has arrived but cannot be rebuilt here."""

    number: int
    reason: str


class Link:
    """One end. Any thread may send; one at a time may receive."""

    plain: ClassVar[dict[str, Any]] = {}  # named tuples of plain data, whose last field is a list of tensors

    def __init__(self, channel: Channel, side: int = 0) -> None:
        self.channel = channel
        self.transport = TensorTransport()
        self.classes = ClassTable(side)
        self._sending = threading.Lock()  # what one frame announces, the next one uses
        self.held: dict[int, int] = {}  # tensors with a home that both sides know: id → number
        self.homes: dict[int, torch.Tensor] = {}  # the same on the other side: by number

    def set_device(self, device: Device) -> None:
        """The worker computes on `device`."""
        self.transport = TensorTransport(device)

    def send(self, message: Any, descriptors: tuple[int, ...] = (), wait: bool = True) -> bool:
        """Send a value, and descriptors with it; raises what pickling raises, before anything is sent.

        With `wait=False` nothing is sent, and False returned, while another message is on its way.
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
            self.channel.send(frame, descriptors)
            return
        learned = self.classes.news()
        news, released = self.transport.news(), self.transport.released()
        try:
            frame = marshal.dumps((kind, fields, headers, news.plain, released, learned))
        except ValueError:
            self.transport.retake(released)
            raise
        self.transport.device.finish()
        self.channel.send(frame, (*news.descriptors, *descriptors))
        self.transport.announce(news)
        self.classes.told(learned)

    def receive(self, timeout: float | None = None) -> tuple[Any, list[int]] | None:
        """The next message and the descriptors that came with it; None if nothing arrives in time."""
        found = self.channel.receive(timeout)
        if found is None:
            return None
        frame, descriptors = found
        kind, fields, headers, *news = marshal.loads(frame)
        if news:
            segments, released, learned = news
            descriptors = self.transport.take(segments, descriptors)
            self.transport.release(released)
            self.classes.take(learned)
        given = [None if header is None else self._tensor(header) for header in headers]
        message = self.plain[kind](*fields, given) if kind else self._unpacked(fields[0], fields[1], given)
        return message, descriptors

    def _unpacked(self, number: int, body: bytes, given: list[Any]) -> Any:
        try:
            return unpack(body, given, self.classes)
        except Exception as error:  # whatever the program's own classes raise when they are rebuilt
            return UnreadableMessage(number, f"{type(error).__name__}: {error}")

    def _header(self, tensor: torch.Tensor) -> tuple[int, Any]:
        number = self.held.get(id(tensor))
        return self.transport.write(tensor) if number is None else (-1, number)

    def _tensor(self, header: tuple[int, Any]) -> torch.Tensor:
        return self.homes[header[1]] if header[0] < 0 else self.transport.read(header)

    def close(self) -> None:
        """Give up the connection; memory goes when the last tensor that looks at it does."""
        self.channel.close()
