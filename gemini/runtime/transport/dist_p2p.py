"""Point-to-point channel: the contents of tensors between two hosts, through torch.distributed.

A frame carries the headers of its tensors; their bytes follow over this channel, in the order of the headers. The
receiver posts its receives in the sender's order, and nothing is negotiated. Each direction has its own tag (gloo) or
its own group (NCCL, which would otherwise queue both directions).

    sender      frame: headers ──────────────► receiver      over the channel
                bytes of header 1, 2, 3 ─────►               over the P2P channel
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gemini.runtime.transport.channel import Channel, ChannelClosed
from gemini.runtime.transport.gloo_pair import TENSORS, GlooPair


def choose_backend(mine: str, theirs: str) -> str:
    """Return NCCL between two different GPUs, given by UUID, else gloo; '' is a device that is no NVIDIA GPU."""
    return "nccl" if mine and theirs and mine != theirs and dist.is_nccl_available() else "gloo"


class P2PChannel:
    """One end. One thread at a time may send, one may receive."""

    def __init__(self, channel: Channel, pair: GlooPair, gpus: tuple[str, str] = ("", "")) -> None:
        self.channel, self.pair, self.side = channel, pair, pair.side
        self.back_end = choose_backend(*gpus)
        try:
            self._nccl = self._connect_nccl() if self.back_end == "nccl" else []
        except RuntimeError as error:
            raise ChannelClosed(f"tensors cannot be exchanged: {error}") from error

    def _connect_nccl(self) -> list[Any]:
        """Return one group per direction: a transfer queued in one must not wait for the other."""
        stores = [dist.PrefixStore(f"nccl {direction}", self.pair.store) for direction in range(2)]
        groups = [dist.ProcessGroupNCCL(store, self.side, 2) for store in stores]
        for direction, group in enumerate(groups):  # groups connect on first use: now, while both ends wait
            first = torch.zeros(1, dtype=torch.uint8, device="cuda")
            move = group.send if direction == self.side else group.recv
            move([first], 1 - self.side, direction).wait(self.pair.timeout)
        torch.cuda.synchronize()
        return groups

    def memory(self, device: torch.device) -> torch.device:
        """Return where bytes of tensors of a device must lie to be sent or received."""
        return device if self._nccl and device.type == "cuda" else torch.device("cpu")

    def send(self, contents: Sequence[torch.Tensor]) -> None:
        """Send bytes that lie in `memory`."""
        self._do("send", contents, self.side)

    def receive(self, contents: Sequence[torch.Tensor]) -> None:
        """Fill tensors with the next bytes."""
        self._do("receive", contents, 1 - self.side)

    def _do(self, what: str, contents: Sequence[torch.Tensor], direction: int) -> None:
        try:
            main = [one for one in contents if not one.is_cuda]
            if main:
                getattr(self.pair, what)(main, TENSORS)
            for one in contents:
                if one.is_cuda:
                    group = self._nccl[direction]
                    move = group.send if what == "send" else group.recv
                    move([one], 1 - self.side, direction).wait(self.pair.timeout)
                    torch.cuda.synchronize(one.device)  # wait() of NCCL only queues the wait
        except RuntimeError as error:
            self.channel.is_broken = True
            raise ChannelClosed(f"tensors cannot be transferred: {error}") from error
        except BaseException:
            self.channel.is_broken = True  # the position in the byte stream is lost
            raise
