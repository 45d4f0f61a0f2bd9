"""The link: any Python value, with tensors anywhere in it, from one process to the other.

A message is one pickle; tensors in it are replaced by headers, their contents go through slabs. Both processes are ours
and of one run: a link is made over a socket pair that a worker inherits, and never reads from anything else. Tensors of
the model that live in shared memory are only named.

Classes that the user's program defines are not importable in a worker, where the program never runs. They travel by
value once, under a number that both sides use from then on; so an output of such a class comes home as the very class
that the program knows.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from gemini.runtime.transport import tensors
from gemini.runtime.transport.channel import Channel
from gemini.runtime.transport.slabs import Pool, Slab, Window


class Link:
    """One end. Any thread may send; one at a time may receive."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pool, self.window = Pool(), Window()
        self.classes = Classes()
        self.held: dict[int, int] = {}  # tensors with a home that both sides know: id → number
        self.homes: list[torch.Tensor] = []  # the same on the other side

    def send(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Send a value, and descriptors with it; raises what pickling raises, before anything is sent."""
        body = io.BytesIO()
        _Packer(body, self).dump(message)
        news = self.pool.news()
        header = pickle.dumps(
            ([segment.size for segment in news], [(s.segment, s.offset, s.size) for s in self.window.released()])
        )
        frame = len(header).to_bytes(4, "little") + header + body.getbuffer()
        self.channel.send(frame, (*(segment.descriptor for segment in news), *descriptors))
        for segment in news:
            segment.forget_descriptor()

    def receive(self, timeout: float | None = None) -> tuple[Any, list[int]] | None:
        """The next message and the descriptors that came with it; None if none arrives in time."""
        found = self.channel.receive(timeout)
        if found is None:
            return None
        frame, descriptors = found
        end = 4 + int.from_bytes(frame[:4], "little")
        sizes, released = pickle.loads(frame[4:end])
        for size, descriptor in zip(sizes, descriptors, strict=False):
            self.window.add(size, descriptor)
        self.pool.release([Slab(*slab) for slab in released])
        return _Unpacker(io.BytesIO(frame[end:]), self).load(), descriptors[len(sizes) :]

    def close(self) -> None:
        """Give up the connection; memory goes when the last tensor that looks at it does."""
        self.channel.close()


class Classes:
    """The classes and functions that cross by number."""

    def __init__(self) -> None:
        self.number: dict[Any, int] = {}
        self.of: dict[int, Any] = {}

    def learn(self, number: int, cls: Any) -> None:
        """Both sides know `cls` as `number`."""
        self.number[cls], self.of[number] = number, cls

    def resolve(self, found: tuple[Any, ...]) -> Any:
        """The class of a name that `name_class` gave it."""
        kind, number, *body = found
        if kind == "new class":
            self.learn(number, pickle.loads(body[0]))
        return self.of[number]


def name_class(cls: type, classes: Classes) -> tuple[Any, ...] | None:
    """How a class of the user's program is named on the way; None for classes that can be imported."""
    if cls in classes.number:
        return ("class", classes.number[cls])
    if not _is_the_users(cls.__module__):
        return None
    number = len(classes.number)
    body = cloudpickle.dumps(cls)
    classes.learn(number, cls)
    return ("new class", number, body)


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, link: Link) -> None:
        super().__init__(file)
        self.link = link

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in self.link.held:
                return ("held", self.link.held[id(value)])
            return ("tensor", tensors.write(self.link.pool, value))
        return name_class(value, self.link.classes) if isinstance(value, type) else None


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, link: Link) -> None:
        super().__init__(file)
        self.link = link

    def persistent_load(self, found: Any) -> Any:
        kind, *rest = found
        if kind == "tensor":
            return tensors.read(self.link.window, rest[0])
        if kind == "held":
            return self.link.homes[rest[0]]
        return self.link.classes.resolve(found)


_FOLDERS: set[str] = {*(path for path in sys.path if path.endswith("-packages")), str(Path(io.__file__).parent)}
_INSTALLED = tuple(str(Path(folder).resolve()) for folder in (*_FOLDERS, str(Path(__file__).parents[2])))


@functools.lru_cache(maxsize=4096)
def _is_the_users(name: str) -> bool:
    """Whether a module belongs to the user's program, rather than to an installed package."""
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and not str(Path(file).resolve()).startswith(_INSTALLED)
