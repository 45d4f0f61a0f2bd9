"""The ledger: tensors of a module that two hosts each have, and their contents as both know them.

Without shared memory a write on one side is not seen on the other. Programs write in ways that nobody announces
(`p.data.add_(…)`, NumPy views, batch normalisation), so before a call the controller compares what is there with what
the worker has, byte by byte, and sends what differs; after it the worker does the same.

    controller   tensors ≠ ledger ──── contents ────► tensors, ledger      before forward and backward
                 tensors, ledger  ◄─── contents ───── ledger ≠ tensors     after them

It costs a copy of the module's tensors on each side, and one comparison, at the speed of memory, for each arrow. A hash
would save the copy, but not be exact, or be slow; and on a GPU it would have to leave it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from gemini.runtime.memory.shared_layout import plan_layout, storage_bytes
from gemini.runtime.transport.tensor_layout import TensorLayout

_library = ctypes.CDLL(None)
_library.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class ReplicaSync:
    """Some tensors on one side. Those that share a storage are one piece."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self.size, self.homes = plan_layout(self.tensors)
        self.first = _pieces(self.homes)  # one tensor of each piece
        with torch.inference_mode(False):  # or it could only be written to where that mode is on
            self.known = [storage_bytes(self.tensors[at]).clone() for at in self.first]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the other side's tensors can hold these: as many, alike, sharing the same storages."""
        size, homes = plan_layout(tensors)
        return size == self.size and _forms(homes) == _forms(self.homes)

    def differing(self) -> tuple[list[int], list[torch.Tensor]]:
        """The pieces that the other side has other contents of, and the contents; it has them now."""
        places = []
        for piece, at in enumerate(self.first):
            now = storage_bytes(self.tensors[at])
            if not _is_same(now, self.known[piece]):
                self.known[piece].copy_(now)
                places.append(piece)
        return places, [self.known[piece] for piece in places]

    def take(self, places: list[int], contents: list[torch.Tensor]) -> None:
        """What the other side has sent."""
        for piece, bytes_ in zip(places, contents, strict=True):
            self.known[piece].copy_(bytes_)
            # As in shared memory: autograd counts no write, and what it has saved is what is there now.
            storage_bytes(self.tensors[self.first[piece]]).copy_(bytes_)


def build_replica(homes: Sequence[TensorLayout], contents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors like those of the other side, in the memory of the contents of their storages."""
    memory = dict(zip(dict.fromkeys(home.offset for home in homes), contents, strict=True))
    found = [home.look(memory[home.offset]) for home in homes]
    return [
        nn.Parameter(tensor, home.requires_grad) if home.is_parameter else tensor
        for tensor, home in zip(found, homes, strict=True)
    ]


def _pieces(homes: list[TensorLayout]) -> list[int]:
    found: dict[int, int] = {}
    for at, home in enumerate(homes):
        found.setdefault(home.offset, at)
    return list(found.values())


def _forms(homes: list[TensorLayout]) -> list[TensorLayout]:
    """Without what workers are told with every call."""
    return [replace(home, requires_grad=False) for home in homes]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether bytes are the same."""
    if one.is_cpu:
        return not _library.memcmp(one.data_ptr(), other.data_ptr(), len(one))
    return bool(torch.equal(one, other))
