"""State: what a run of the model may change, saved and put back.

Capture runs the model several times; the user must not notice. `Saved` holds buffers, generators, the plain
attributes of every module and what runs write of its tensors. Comparing two snapshots also tells which modules
keep Python state in their forward: these stay basic blocks, since a graph would not repeat the change.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from gemini.snapshot.attribute_values import MISSING, copied, equal, generators, is_same, reached
from gemini.snapshot.attribute_values import put_back as put_items_back
from gemini.snapshot.tensor_writes import Copy, has_contents, held_tensors, memory_of, put_back, watched_writes

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
    """The plain attributes of every module, with what containers and objects in them hold."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.values = {
            name: {key: value for key, value in vars(module).items() if key not in _INTERNAL or key == "training"}
            for name, module in self.modules.items()
        }
        known: dict[int, tuple[tuple[Any, Any], ...]] = {}  # many modules hold the same object: a configuration
        self.contents = {
            name: {key: _contents(value, known) for key, value in found.items()} for name, found in self.values.items()
        }
        self.slots = {name: tuple(dict(held) for held in _slots(module)) for name, module in self.modules.items()}

    def changed(self) -> dict[str, list[str]]:
        """Modules whose attributes, buffers or parameters are other objects now, with their names."""
        found: dict[str, list[str]] = {}
        seen: dict[int, bool] = {}

        def same(held: tuple[tuple[Any, Any], ...]) -> bool:
            if id(held) not in seen:
                seen[id(held)] = all(is_same(live, saved) for live, saved in held)
            return seen[id(held)]

        for name, module in self.modules.items():
            before, contents = self.values[name], self.contents[name]
            now = {key: value for key, value in vars(module).items() if key in before or key not in _INTERNAL}
            keys = [
                key
                for key in {**before, **now}
                if now.get(key, MISSING) is not before.get(key, MISSING)
                and not equal(now.get(key, MISSING), before.get(key, MISSING))
            ]
            keys += [key for key, held in contents.items() if key in now and held and not same(held)]
            for live, saved in zip(_slots(module), self.slots[name], strict=True):
                keys += [key for key, value in live.items() if saved.get(key, MISSING) is not value]
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
            if own.get(key, MISSING) is not value and wanted(key):
                own[key] = value
        for key, held in self.contents[name].items():
            for live, saved in held if wanted(key) else ():
                if not is_same(live, saved):
                    put_items_back(live, saved)
        for live, saved in zip(_slots(module), self.slots[name], strict=True):
            for key in [key for key in live if wanted(key) and live[key] is not saved.get(key, MISSING)]:
                if key in saved:
                    live[key] = saved[key]
                else:
                    del live[key]


def _contents(value: Any, known: dict[int, tuple[tuple[Any, Any], ...]]) -> tuple[tuple[Any, Any], ...]:
    """What a value holds that can change, each with what it holds in turn."""
    if id(value) not in known:
        known[id(value)] = tuple((one, copied(one)) for one in reached(value))
    return known[id(value)]


def _slots(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module holds its buffers and parameters; a scripted one holds them out of reach."""
    return tuple(held for held in (module._buffers, module._parameters) if isinstance(held, dict))


def _memory(held: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Tensors with the memory that they have, as far as they could be given another one."""
    return [
        (name, tensor, tensor.data)
        for name, tensor in held
        if has_contents(tensor) and (isinstance(tensor, nn.Parameter) or type(tensor) is torch.Tensor)
        if memory_of(tensor)
    ]


class Saved:
    """All that a run may change. `restore` puts it back as often as it is called.

    Tensors are copied at once, or, inside `watching()`, only those that a run is about to write.
    """

    def __init__(self, model: nn.Module, *, watch: bool = False) -> None:
        self.model = model
        self.attributes = Attributes(model)
        self.generators = Generators()
        own = [value for found in self.attributes.values.values() for value in found.values()]
        self.own_generators = [(one, one.get_state()) for value in own for one in generators(value)]
        self.writes = watched_writes() if watch else None
        self.copies: list[Copy] = []
        self.reassigned: set[str] = set()  # tensors that runs gave other memory (`tensor.data = …`)
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
            self._restore_memory()
            if self.writes is not None:
                self.writes.undo()
            for copy in self.copies:
                put_back(copy)
        self.generators.restore()
        for generator, state in self.own_generators:
            generator.set_state(state)

    def _restore_memory(self) -> None:
        for name, tensor, before in self.memory:
            if tensor.data_ptr() != before.data_ptr():
                tensor.data = before
                self.reassigned.add(name.removeprefix("."))
