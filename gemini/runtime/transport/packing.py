"""Packing: the arguments or the result of a call as bytes, with its tensors taken out.

The tensors are what autograd must see, so they travel beside the rest: `unpack(pack(value))` is the value with whatever
tensors one puts in the place of its own. The same tensor in two places is one.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch

from gemini.runtime.transport.link import Classes, name_class

Packed = tuple[bytes, list[torch.Tensor]]


def pack(value: Any, classes: Classes) -> Packed:
    """The bytes of a value and the tensors in it."""
    body = io.BytesIO()
    packer = _Packer(body, classes)
    packer.dump(value)
    return body.getvalue(), packer.tensors


def unpack(body: bytes, tensors: Sequence[torch.Tensor], classes: Classes) -> Any:
    """The value, with these tensors in the place of its own."""
    return _Unpacker(io.BytesIO(body), tensors, classes).load()


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, classes: Classes) -> None:
        super().__init__(file)
        self.classes = classes
        self.tensors: list[torch.Tensor] = []
        self.place: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            at = self.place.setdefault(id(value), len(self.tensors))
            if at == len(self.tensors):
                self.tensors.append(value)
            return at
        return name_class(value, self.classes) if isinstance(value, type) else None


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor], classes: Classes) -> None:
        super().__init__(file)
        self.tensors, self.classes = tensors, classes

    def persistent_load(self, found: Any) -> Any:
        return self.tensors[found] if isinstance(found, int) else self.classes.resolve(found)
