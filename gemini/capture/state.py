"""State: what a run of the model may change, saved and put back.

Capture runs the model several times; the user must not notice. `Saved` holds buffers, generators, the plain
attributes of every module and what runs write of its tensors. Comparing two snapshots also tells which modules
keep Python state in their forward: these stay basic blocks, since a graph would not repeat the change.
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn

from gemini.capture.writes import Copy, has_contents, held_tensors, memory_of, put_back, watched_writes

_CONTAINERS = (list, dict, set, deque)
_LIBRARIES = (  # and this one
    *{sysconfig.get_path(one) + os.sep for one in ("stdlib", "purelib", "platlib")},
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
)
_MANY = 10_000  # items, or containers: more are data, and are not looked into
_INTERNAL = frozenset(vars(nn.Module()))


class Generators:
    """The states of torch's, Python's and NumPy's generators."""

    def __init__(self) -> None:
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        self.python = random.getstate()
        self.numpy = np.random.get_state()

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def undrawn() -> Iterator[None]:
    """Whatever draws inside, libraries that we use too, the program's random numbers stay its own."""
    generators = Generators()
    try:
        yield
    finally:
        generators.restore()


def seed_all(seed: int) -> None:
    """Seed torch's, Python's and NumPy's generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def python_randomness() -> tuple[Any, ...]:
    """The states of Python's and NumPy's generators, comparable."""
    numpy = np.random.get_state(legacy=True)
    return (random.getstate(), numpy[1].tobytes(), numpy[2:])  # type: ignore[index]


def torch_randomness() -> tuple[Any, ...]:
    """The states of torch's generators, comparable."""
    devices = torch.cuda.default_generators if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    return (torch.get_rng_state().numpy().tobytes(), *(generator.get_offset() for generator in devices))


class Attributes:
    """The plain attributes of every module, with what containers and objects of the program's own classes hold."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.values = {
            name: {key: value for key, value in vars(module).items() if key not in _INTERNAL or key == "training"}
            for name, module in self.modules.items()
        }
        self.contents = {
            name: {key: tuple((one, _copy(one)) for one in _reached(value)) for key, value in found.items()}
            for name, found in self.values.items()
        }
        self.slots = {name: tuple(dict(held) for held in _slots(module)) for name, module in self.modules.items()}

    def changed(self) -> dict[str, list[str]]:
        """Modules whose attributes, buffers or parameters are other objects now, with their names."""
        found: dict[str, list[str]] = {}
        for name, module in self.modules.items():
            before, contents = self.values[name], self.contents[name]
            now = {key: value for key, value in vars(module).items() if key in before or key not in _INTERNAL}
            keys = [
                key
                for key in {**before, **now}
                if now.get(key, _MISSING) is not before.get(key, _MISSING)
                and not _equal(now.get(key, _MISSING), before.get(key, _MISSING))
            ]
            keys += [
                key
                for key, held in contents.items()
                if key in now and not all(_same_items(live, saved) for live, saved in held)
            ]
            for live, saved in zip(_slots(module), self.slots[name], strict=True):
                keys += [key for key, value in live.items() if saved.get(key, _MISSING) is not value]
            if keys:
                found[name] = keys
        return found

    def restore(self, only: dict[str, list[str]] | None = None) -> None:
        """Put attributes back, containers in place: all, or only those named."""
        for name in self.modules if only is None else only:
            keys = None if only is None else set(only[name])
            self._restore_module(name, lambda key, keys=keys: keys is None or key in keys)  # type: ignore[misc]

    def _restore_module(self, name: str, wanted: Callable[[str], bool]) -> None:
        module, before = self.modules[name], self.values[name]
        own: dict[str, Any] = module.__dict__
        for key in [key for key in own if key not in _INTERNAL and key not in before and wanted(key)]:
            del own[key]
        for key, value in before.items():
            if own.get(key, _MISSING) is not value and wanted(key):
                own[key] = value
        for key, held in self.contents[name].items():
            for live, saved in held if wanted(key) else ():
                if not _same_items(live, saved):
                    _refill(live, saved)
        for live, saved in zip(_slots(module), self.slots[name], strict=True):
            for key in [key for key in live if wanted(key) and live[key] is not saved.get(key, _MISSING)]:
                if key in saved:
                    live[key] = saved[key]
                else:
                    del live[key]


_MISSING: Any = object()


def _slots(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module holds its buffers and parameters; a scripted one holds them out of reach."""
    return tuple(held for held in (module._buffers, module._parameters) if isinstance(held, dict))


def _reached(value: Any) -> Iterator[Any]:
    """The containers that a value holds, at any depth, and the attributes of objects of the program's own classes."""
    seen: set[int] = set()
    waiting = [value]
    while waiting and len(seen) < _MANY:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (str, int, float, torch.Tensor)):
            continue
        seen.add(id(one))
        if not isinstance(one, _CONTAINERS):
            if not _is_of_program(one):
                continue
            one = vars(one)
        yield one
        if len(one) <= _MANY:
            waiting += one.values() if isinstance(one, dict) else one


def _is_of_program(value: Any) -> bool:
    """Whether it is an object with attributes, of a class that no library has made."""
    kind = type(value)
    if isinstance(value, (nn.Module, torch.Tensor, type)) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__ == "__main__" or (bool(file) and not file.startswith(_LIBRARIES))


def _copy(value: Any) -> Any:
    """The items, as they are: a class of its own may copy itself into something else."""
    return next(kind(value) for kind in _CONTAINERS if isinstance(value, kind))


def _equal(a: Any, b: Any) -> bool:
    plain = (bool, int, float, str, type(None))
    return isinstance(a, plain) and isinstance(b, plain) and bool(a == b)


def _same_items(a: Any, b: Any) -> bool:
    """Whether a live container holds what was saved of it."""
    if not isinstance(a, type(b)) or len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(key in b and (b[key] is value or _equal(b[key], value)) for key, value in a.items())
    if isinstance(a, set):
        return bool(a == b)
    return all(x is y or _equal(x, y) for x, y in zip(a, b, strict=True))


def _refill(live: Any, saved: Any) -> None:
    live.clear()
    if isinstance(live, (dict, set)):
        live.update(saved)
    else:
        live.extend(saved)


_moved: ContextVar[set[str] | None] = ContextVar("moved", default=None)


@contextmanager
def keeping_memory(model: nn.Module) -> Iterator[set[str]]:
    """The names of tensors to which runs inside give other memory; they have their own again afterwards."""
    before = _memory(held_tensors(model))
    found: set[str] = set()
    token = _moved.set(found)
    try:
        yield found
    finally:
        _put_memory_back(before)
        _moved.reset(token)


def _memory(held: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Tensors with the memory that they have, as far as they could be given another one."""
    return [
        (name, tensor, tensor.data)
        for name, tensor in held
        if has_contents(tensor) and (isinstance(tensor, nn.Parameter) or type(tensor) is torch.Tensor)
        if memory_of(tensor)
    ]


def _put_memory_back(memory: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    moved = _moved.get()
    for name, tensor, before in memory:
        if tensor.data_ptr() != before.data_ptr():  # `tensor.data = …`
            tensor.data = before
            if moved is not None:
                moved.add(name.removeprefix("."))


class Saved:
    """All that a run may change. `restore` puts it back as often as it is called.

    Tensors are copied at once, or, inside `watching()`, only those that a run is about to write.
    """

    def __init__(self, model: nn.Module, *, watch: bool = False) -> None:
        self.model = model
        self.attributes = Attributes(model)
        self.generators = Generators()
        own = (value for module in model.modules() for value in vars(module).values())
        self.own_generators = [(g, g.get_state()) for g in own if isinstance(g, torch.Generator)]
        self.writes = watched_writes() if watch else None
        self.copies: list[Copy] = []
        self.watch_new()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Copy what is about to be written, until the block ends."""
        if self.writes is None:
            yield
            return
        try:
            with self.writes:
                yield
        finally:
            self.writes.forget_compiled()

    def watch_new(self) -> None:
        """Take in tensors that the model has come to hold since."""
        held = [(name, tensor) for name, tensor in held_tensors(self.model) if has_contents(tensor)]
        self.memory = _memory(held)
        if self.writes is not None:
            self.writes.watch(held)
        else:
            self.copies = [Copy(name, tensor, tensor.detach().clone()) for name, tensor in held]

    def written(self) -> list[Copy]:
        """The tensors that runs have written, or may have, each with its contents before."""
        return self.copies if self.writes is None else self.writes.copies

    def restore(self) -> None:
        """Put everything back."""
        self.attributes.restore()
        self.restore_tensors()

    def restore_tensors(self) -> None:
        """Put tensors and generators back."""
        with torch.no_grad():
            _put_memory_back(self.memory)
            if self.writes is not None:
                self.writes.undo()
            for copy in self.copies:
                put_back(copy)
        self.generators.restore()
        for generator, state in self.own_generators:
            generator.set_state(state)
