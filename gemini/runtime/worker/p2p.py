"""Peer links: the links of a worker to other workers, and the messages that have arrived over them.

A sender never waits for a receiver: contents are in shared memory, or leave in a thread (between hosts), and while a
socket is full the sender takes in what has arrived. Two workers that send to each other at the same time therefore
cannot block. While a worker waits for its peers it also listens to the controller, which may abort the step.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable
from typing import Any

from gemini.runtime.devices.base import Segment
from gemini.runtime.step_messages import AbortStep, PeerMessage
from gemini.runtime.transport.channel import ChannelClosed
from gemini.runtime.transport.link import Link

_ENOUGH = 8  # released slabs that are worth a separate message


class StepAborted(Exception):
    """The controller has aborted the step: another worker has failed, or the script was interrupted."""


class PeerLinks:
    """All links of one worker."""

    def __init__(self, control: Link) -> None:
        self.control = control
        self.links: dict[int, Link] = {}
        self.postponed: deque[tuple[Any, list[int]]] = deque()  # requests that arrived during a step
        self.abort: AbortStep | None = None
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._by_descriptor: dict[int, int] = {}
        self._early: list[PeerMessage] = []  # messages of steps that this worker has not begun
        self.opened: dict[tuple[int, int], Segment] = {}  # gradient memory of other workers: worker, segment
        self._announced: set[tuple[int, int]] = set()  # own segments that a peer can open

    def add(self, peer: int, link: Link) -> None:
        """Add a link to another worker."""
        self.links[peer] = link
        self._by_descriptor[link.fileno()] = peer
        self._poll.register(link.fileno(), select.POLLIN)

    def begin(self, step: int, sink: Callable[[PeerMessage], None]) -> None:
        """Start a step: its messages go to `sink` from now on."""
        self.step, self.sink, self.abort = step, sink, None
        early, self._early = self._early, []
        for message in early:
            self._take(message)

    # ── sending ────────────────────────────────────────────────────────────────────────────────────────────────
    def announce(self, peer: int, segment: int) -> bool:
        """Return whether a peer has not opened one of this worker's segments; it will have."""
        is_new = (peer, segment) not in self._announced
        self._announced.add((peer, segment))
        return is_new

    def send(self, peer: int, message: PeerMessage, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message to a peer."""
        link = self.links[peer]
        while not link.has_room(0):
            self.receive(0)
            link.has_room(1)
        try:
            link.send(message, descriptors)
        except ChannelClosed:
            self._handle_lost()

    def release_slabs(self, least: int = _ENOUGH) -> None:
        """Report released slabs to peers, if no other message has carried them."""
        for peer, link in self.links.items():
            pending = sum(one.mapped.pending_releases for one in link.transport.buffers)
            if pending >= least:
                self.send(peer, PeerMessage(self.step, "", 0, [], b"", []))

    # ── receiving ────────────────────────────────────────────────────────────────────────────────────────────────
    def receive(self, timeout: int | None = None) -> None:
        """Take in what has arrived; wait for something for `timeout` milliseconds, None without limit."""
        if self.control.has_more:  # it arrived together with the request for the step
            self._receive_control()
            timeout = 0
        for descriptor, _ in self._poll.poll(timeout):
            peer = self._by_descriptor.get(descriptor)
            if peer is None:
                self._receive_control()
            else:
                self._receive_from(peer)
        if self.abort is not None:
            raise StepAborted

    def _receive_from(self, peer: int) -> None:
        try:
            found = self.links[peer].receive(0)
            while found is not None:
                if found[1]:  # memory for the gradients of a group
                    number, _, _, size = found[0].names
                    self.opened[peer, number] = self.control.transport.device.open(size, b"", tuple(found[1]))
                self._take(found[0])
                found = self.links[peer].receive(0)
        except ChannelClosed:
            self._handle_lost(peer)

    def _take(self, message: Any) -> None:
        if message.step > self.step:
            self._early.append(message)
        elif message.step == self.step and message.kind:
            self.sink(message)

    def _receive_control(self) -> None:
        found = self.control.receive(0)
        while found is not None:
            if isinstance(found[0], AbortStep):
                if found[0].step == self.step:
                    self.abort = found[0]
            else:
                self.postponed.append(found)
            found = self.control.receive(0)

    def _handle_lost(self, peer: int | None = None) -> None:
        """Wait for the controller after a peer is gone: it aborts the step or ends this process."""
        if peer is not None:
            descriptor = self.links[peer].fileno()
            if descriptor in self._by_descriptor:
                self._poll.unregister(descriptor)
                del self._by_descriptor[descriptor]
        waiting = select.poll()
        waiting.register(self.control.fileno(), select.POLLIN)
        self._receive_control()
        while self.abort is None:
            waiting.poll()
            self._receive_control()
        raise StepAborted
