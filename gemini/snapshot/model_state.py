"""Model state: everything that a run of a model may change, saved and restored.

Capture runs the model several times without a visible effect. A `ModelSnapshot` holds the tensors that runs write, the
generators and the plain attributes of every module. Comparing snapshots also finds the modules whose forward changes
Python state: these stay basic blocks, since a graph would not repeat the change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gemini.snapshot.attribute_values import (
    MISSING,
    copy_contents,
    generators,
    is_unchanged,
    iter_mutable,
    plain_equal,
    restore_contents,
)
from gemini.snapshot.rng_snapshot import GeneratorStates
from gemini.snapshot.tensor_writes import (
    TensorCopy,
    has_contents,
    make_write_mode,
    model_tensors,
    restore_tensor,
    storage_id,
)

_INTERNAL = frozenset(vars(nn.Module()))


class AttributeSnapshot:
    """The plain attributes of every module, with the contents of containers and objects in them."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.values = {
            name: {key: value for key, value in vars(module).items() if key not in _INTERNAL or key == "training"}
            for name, module in self.modules.items()
        }
        known: dict[int, tuple[tuple[Any, Any], ...]] = {}  # many modules share an object: a configuration
        self.contents = {
            name: {key: _contents(value, known) for key, value in found.items()} for name, found in self.values.items()
        }
        self.slots = {name: tuple(dict(table) for table in _slots(module)) for name, module in self.modules.items()}

    def find_changes(self) -> dict[str, list[str]]:
        """Return the modules whose attributes, buffers or parameters have changed, with the attribute names."""
        found: dict[str, list[str]] = {}
        seen: dict[int, bool] = {}

        def are_unchanged(copies: tuple[tuple[Any, Any], ...]) -> bool:
            if id(copies) not in seen:
                seen[id(copies)] = all(is_unchanged(live, saved) for live, saved in copies)
            return seen[id(copies)]

        for name, module in self.modules.items():
            before, contents = self.values[name], self.contents[name]
            now = {key: value for key, value in vars(module).items() if key in before or key not in _INTERNAL}
            keys = [
                key
                for key in {**before, **now}
                if now.get(key, MISSING) is not before.get(key, MISSING)
                and not plain_equal(now.get(key, MISSING), before.get(key, MISSING))
            ]
            keys += [key for key, copies in contents.items() if key in now and copies and not are_unchanged(copies)]
            for live, saved in zip(_slots(module), self.slots[name], strict=True):
                keys += [key for key, value in live.items() if saved.get(key, MISSING) is not value]
            if keys:
                found[name] = keys
        return found

    def restore(self, only: dict[str, list[str]] | None = None) -> None:
        """Restore all attributes, or only those named; containers in place."""
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
        self._restore_contents(name, wanted)
        for live, saved in zip(_slots(module), self.slots[name], strict=True):
            for key in [key for key in live if wanted(key) and live[key] is not saved.get(key, MISSING)]:
                if key in saved:
                    live[key] = saved[key]
                else:
                    del live[key]

    def restore_containers(self) -> None:
        """Restore what containers and objects held, and leave the attributes as they are."""
        for name in self.modules:
            self._restore_contents(name, lambda _: True)

    def _restore_contents(self, name: str, wanted: Callable[[str], bool]) -> None:
        for key, copies in self.contents[name].items():
            for live, saved in copies if wanted(key) else ():
                if not is_unchanged(live, saved):
                    restore_contents(live, saved)


def _contents(value: Any, known: dict[int, tuple[tuple[Any, Any], ...]]) -> tuple[tuple[Any, Any], ...]:
    """Return the mutable parts of a value, each with a copy."""
    if id(value) not in known:
        known[id(value)] = tuple((one, copy_contents(one)) for one in iter_mutable(value))
    return known[id(value)]


def _slots(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the dictionaries of buffers, parameters and submodules of a module; a scripted module has none."""
    tables = module._buffers, module._parameters, module._modules
    return tuple(table for table in tables if isinstance(table, dict))


def _memory(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return the tensors that can be assigned other memory, each with its memory."""
    return [
        (name, tensor, tensor.data)
        for name, tensor in tensors
        if has_contents(tensor) and (isinstance(tensor, nn.Parameter) or type(tensor) is torch.Tensor)
        if storage_id(tensor)
    ]


class ModelSnapshot:
    """Everything that a run may change. `restore` may be called any number of times.

    Tensors are copied at once; with `watch`, inside `watch_writes()`, each before its first write.
    """

    def __init__(self, model: nn.Module, *, watch: bool = False) -> None:
        self.model = model
        self.attributes = AttributeSnapshot(model)
        self.generators = GeneratorStates()
        own = [value for found in self.attributes.values.values() for value in found.values()]
        self.own_generators = [(one, one.get_state()) for value in own for one in generators(value)]
        self.writes = make_write_mode() if watch else None
        self.copies: list[TensorCopy] = []
        self.reassigned: set[str] = set()  # tensors that runs gave other memory (`tensor.data = …`)
        self.add_new_tensors()

    @contextmanager
    def watch_writes(self) -> Iterator[None]:
        """Copy each tensor before its first write, until the block ends."""
        if self.writes is None:
            yield
            return
        try:
            with self.writes:
                yield
        finally:
            self.writes.forget_compiled()

    def add_new_tensors(self) -> None:
        """Include the tensors that were added to the model since."""
        tensors = [(name, tensor) for name, tensor in model_tensors(self.model) if has_contents(tensor)]
        self.memory = _memory(tensors)
        self.trained = [(tensor, tensor.requires_grad) for _, tensor in tensors if tensor.is_leaf]
        if self.writes is not None:
            self.writes.watch(tensors)
        else:
            self.copies = [TensorCopy(name, tensor, tensor.detach().clone()) for name, tensor in tensors]

    def written_tensors(self) -> list[TensorCopy]:
        """Return the tensors that runs have or may have written, each with its contents before."""
        return self.copies if self.writes is None else self.writes.copies

    def restore(self) -> None:
        """Restore everything."""
        self.attributes.restore()
        self.restore_tensors()

    def restore_tensors(self) -> None:
        """Restore tensors and generators."""
        with torch.no_grad():
            self._restore_memory()
            if self.writes is not None:
                self.writes.undo()
            for copy in self.copies:
                restore_tensor(copy)
        for tensor, requires_grad in self.trained:
            if tensor.requires_grad != requires_grad and tensor.is_leaf:  # a forward that freezes its layers
                tensor.requires_grad_(requires_grad)
        self.generators.restore()
        for generator, state in self.own_generators:
            generator.set_state(state)

    def _restore_memory(self) -> None:
        for name, tensor, before in self.memory:
            if tensor.data_ptr() != before.data_ptr():
                tensor.data = before
                self.reassigned.add(name.removeprefix("."))
