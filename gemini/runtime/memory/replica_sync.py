"""Replica sync: keeps the tensors of a module equal on two hosts that share no memory.

A write on one side is not visible on the other, and scripts write without notice (`p.data.add_(…)`, NumPy views, batch
normalization). Before a call the controller therefore compares its tensors byte by byte with the last contents that
both sides had, and sends what differs; after the call the worker does the same.

    controller   tensors ≠ known ──── contents ────► tensors, known      before forward and backward
                 tensors, known  ◄─── contents ───── known ≠ tensors     after them

This costs a copy of the module's tensors on each side, and one comparison at memory speed per arrow. A hash would save
the copy but be inexact or slow, and on a GPU the contents would have to leave the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from gemini.runtime.memory.content_hash import hash_contents
from gemini.runtime.memory.shared_layout import plan_layout, storage_bytes
from gemini.runtime.transport.tensor_layout import TensorLayout

_library = ctypes.CDLL(None)
_library.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class ReplicaSync:
    """Tensors on one side and their contents as both sides have them. Tensors that share a storage are one piece."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self.size, self.layouts = plan_layout(self.tensors)
        self.first = _pieces(self.layouts)  # one tensor of each piece
        with torch.inference_mode(False):  # a copy made in inference mode could only be written in that mode
            self.known = [storage_bytes(self.tensors[at]).clone() for at in self.first]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the other side's tensors can hold these: the same number, layouts and shared storages."""
        size, layouts = plan_layout(tensors)
        return size == self.size and _forms(layouts) == _forms(self.layouts)

    def pop_changes(self) -> tuple[list[int], list[torch.Tensor]]:
        """Return the pieces that have changed on this side and their contents, which become the known ones."""
        places = []
        for piece, at in enumerate(self.first):
            now = storage_bytes(self.tensors[at])
            if not _is_same(now, self.known[piece]):
                self.known[piece].copy_(now)
                places.append(piece)
        return places, [self.known[piece] for piece in places]

    def contents(self, places: Sequence[int]) -> list[torch.Tensor]:
        """Return the present bytes of these pieces."""
        return [storage_bytes(self.tensors[self.first[piece]]) for piece in places]

    def hashes(self) -> list[int]:
        """Return the hashes of the pieces on this side."""
        return [hash_contents(storage_bytes(self.tensors[at])) for at in self.first]

    def accept(self, places: Sequence[int]) -> None:
        """Note that the other side has the present contents of these pieces."""
        for piece in places:
            self.known[piece].copy_(storage_bytes(self.tensors[self.first[piece]]))

    def apply_changes(self, places: list[int], contents: list[torch.Tensor]) -> None:
        """Write contents that the other side has sent."""
        for piece, bytes_ in zip(places, contents, strict=True):
            self.known[piece].copy_(bytes_)
            # As in shared memory: no version counter is bumped, and saved tensors have the new contents.
            storage_bytes(self.tensors[self.first[piece]]).copy_(bytes_)


def build_replica(layouts: Sequence[TensorLayout], contents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors like those of the other side, on the memory of the contents of their storages."""
    memory = dict(zip(dict.fromkeys(layout.offset for layout in layouts), contents, strict=True))
    found = [layout.view(memory[layout.offset]) for layout in layouts]
    return [
        nn.Parameter(tensor, layout.requires_grad) if layout.is_parameter else tensor
        for tensor, layout in zip(found, layouts, strict=True)
    ]


def _pieces(layouts: list[TensorLayout]) -> list[int]:
    found: dict[int, int] = {}
    for at, layout in enumerate(layouts):
        found.setdefault(layout.offset, at)
    return list(found.values())


def _forms(layouts: list[TensorLayout]) -> list[TensorLayout]:
    """Return the layouts without what is sent with every call."""
    return [replace(layout, requires_grad=False) for layout in layouts]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether bytes are equal."""
    if one.is_cpu:
        return not _library.memcmp(one.data_ptr(), other.data_ptr(), len(one))
    return bool(torch.equal(one, other))
