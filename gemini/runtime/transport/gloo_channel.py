"""Gloo channel: the frames of a channel between hosts, through torch.distributed.

    frame     8 bytes: length of the body     32 bytes: keyed hash of direction, number and body     body

The first 4 KB of a frame are one message of gloo, the rest, if any, is a second one. A thread receives them and writes
them to a local socket, from which they are read and polled like those of any channel.

gloo authenticates nobody, and frames are unpickled. Both ends therefore have a key of this connection, which they got
over a trusted way (`gemini.runtime.hosts`); a frame that fails the check closes the channel. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import threading

import torch

from gemini.runtime.transport.channel import Channel, ChannelClosed
from gemini.runtime.transport.gloo_pair import FRAMES, GlooPair

_HASH = 32  # bytes
_HEAD = 8 + _HASH
_ENDING = 2.0  # seconds for the thread to end
_FIRST = 4096  # bytes of the first message of a frame


class GlooChannel(Channel):
    """One end of a connection of two processes on different hosts."""

    def __init__(self, pair: GlooPair, key: bytes) -> None:
        ours, theirs = Channel.pair()
        super().__init__(ours)
        self.ends, self._inbox = pair, Channel(theirs)
        self._keys = [hmac.digest(key, bytes([side]), "sha256") for side in (pair.side, 1 - pair.side)]
        self._sent = 0
        self._order = threading.Lock()  # numbers follow the order of sending
        self._thread = threading.Thread(target=self._receive_all, name="gemini-frames", daemon=True)
        self._thread.start()

    def send(self, body: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send one frame; raise ChannelClosed if the other side is gone."""
        if descriptors:
            raise ValueError("descriptors cannot be sent to another host")
        with self._order:
            self._check()
            number, self._sent = self._sent, self._sent + 1
            frame = len(body).to_bytes(8, "little") + _hash(self._keys[0], number, body) + body
            try:
                rest = [_bytes(frame[_FIRST:])] if len(frame) > _FIRST else []
                self.ends.send([_bytes(frame[:_FIRST].ljust(_FIRST, b"\0")), *rest], FRAMES)
            except RuntimeError as error:
                self.is_broken = True
                raise ChannelClosed(str(error)) from error
            except BaseException:
                self.is_broken = True
                raise

    def close(self) -> None:
        """End the connection, and the thread: one that waits in gloo at the exit of Python would abort the process."""
        self.ends.close()
        super().close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_ENDING)

    def cork(self) -> None:
        """Do nothing: the contents of tensors follow their frame, whose receiver waits for them."""

    def uncork(self) -> None:
        """Do nothing: no frame is held back."""

    def set_send_timeout(self, seconds: float) -> None:
        """Do nothing: the pair has its own limit."""

    def _receive_all(self) -> None:
        number = 0
        try:
            while True:
                self._inbox.send(self._receive_frame(number))
                number += 1
        except (RuntimeError, ChannelClosed, OSError):
            pass  # the reader finds its socket closed
        finally:
            self._inbox.close()

    def _receive_frame(self, number: int) -> bytes:
        first = torch.empty(_FIRST, dtype=torch.uint8)
        self.ends.receive([first], FRAMES)
        head = first.numpy().tobytes()
        length = int.from_bytes(head[:8], "little")
        body: bytes = head[_HEAD : _HEAD + length]
        if len(body) < length:
            rest = torch.empty(length - len(body), dtype=torch.uint8)
            self.ends.receive([rest], FRAMES)
            body += rest.numpy().tobytes()
        if not hmac.compare_digest(head[8:_HEAD], _hash(self._keys[1], number, body)):
            raise ChannelClosed("a frame failed its authentication")
        return body


def _hash(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "little") + body, "sha256")


def _bytes(contents: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(contents), dtype=torch.uint8)
