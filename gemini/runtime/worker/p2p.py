"""Peers: the links of a worker to the others, and what has arrived over them.

Nobody who sends waits for a receiver: contents are in shared memory, and where a socket is full of notices, whatever
has arrived meanwhile is taken in until there is room. So two workers that send to each other at once cannot block.
While a worker waits for its peers it hears the controller as well, which may have the step abandoned.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable
from typing import Any

from gemini.runtime.step_messages import AbortStep, PeerMessage
from gemini.runtime.transport.channel import ChannelClosed
from gemini.runtime.transport.link import Link

_ENOUGH = 8  # slabs to give back that are worth a message of their own


class StepAborted(Exception):
    """The controller has given the step up: another worker has failed, or the program was interrupted."""


class PeerLinks:
    """All links of one worker."""

    def __init__(self, control: Link) -> None:
        self.control = control
        self.links: dict[int, Link] = {}
        self.postponed: deque[tuple[Any, list[int]]] = deque()  # requests that came in the middle of a step
        self.abandon: AbortStep | None = None
        self._poll = select.poll()
        self._poll.register(control.channel.fileno(), select.POLLIN)
        self._by_descriptor: dict[int, int] = {}
        self._early: list[PeerMessage] = []  # of steps that this worker has not begun

    def add(self, peer: int, link: Link) -> None:
        """A link to another worker."""
        self.links[peer] = link
        self._by_descriptor[link.channel.fileno()] = peer
        self._poll.register(link.channel.fileno(), select.POLLIN)

    def begin(self, step: int, sink: Callable[[PeerMessage], None]) -> None:
        """Parcels of this step go to `sink` from now on."""
        self.step, self.sink, self.abandon = step, sink, None
        early, self._early = self._early, []
        for parcel in early:
            self._take(parcel)

    # ── sending ────────────────────────────────────────────────────────────────────────────────────────────────
    def send(self, peer: int, parcel: PeerMessage) -> None:
        """Put a parcel on its way."""
        link = self.links[peer]
        room = select.poll()
        room.register(link.channel.fileno(), select.POLLOUT)
        while not room.poll(0):
            self.hear(0)
            room.poll(1)
        try:
            link.send(parcel)
        except ChannelClosed:
            self._lost()

    def give_back(self, least: int = _ENOUGH) -> None:
        """Tell peers of slabs that are free again, where no other message has taken the news along."""
        for peer, link in self.links.items():
            owed = sum(len(line.window._released) for line in link.transport.lines)
            if owed >= least:
                self.send(peer, PeerMessage(self.step, "", 0, [], b"", []))

    # ── hearing ────────────────────────────────────────────────────────────────────────────────────────────────
    def hear(self, timeout: int | None = None) -> None:
        """Take in what has arrived; wait for something if `timeout` (milliseconds) says so."""
        if self.control.channel.has_more:  # it came together with the request for the step
            self._heed()
            timeout = 0
        for descriptor, _ in self._poll.poll(timeout):
            peer = self._by_descriptor.get(descriptor)
            if peer is None:
                self._heed()
            else:
                self._receive(peer)
        if self.abandon is not None:
            raise StepAborted

    def _receive(self, peer: int) -> None:
        try:
            found = self.links[peer].receive(0)
            while found is not None:
                self._take(found[0])
                found = self.links[peer].receive(0)
        except ChannelClosed:
            self._lost(peer)

    def _take(self, parcel: Any) -> None:
        if parcel.step > self.step:
            self._early.append(parcel)
        elif parcel.step == self.step and parcel.kind:
            self.sink(parcel)

    def _heed(self) -> None:
        found = self.control.receive(0)
        while found is not None:
            if isinstance(found[0], AbortStep):
                if found[0].step == self.step:
                    self.abandon = found[0]
            else:
                self.postponed.append(found)
            found = self.control.receive(0)

    def _lost(self, peer: int | None = None) -> None:
        """A peer is gone: the controller notices, and says so or ends us."""
        if peer is not None:
            descriptor = self.links[peer].channel.fileno()
            if descriptor in self._by_descriptor:
                self._poll.unregister(descriptor)
                del self._by_descriptor[descriptor]
        waiting = select.poll()
        waiting.register(self.control.channel.fileno(), select.POLLIN)
        self._heed()
        while self.abandon is None:
            waiting.poll()
            self._heed()
        raise StepAborted
