"""Model version: the modules and parameters of a model, and a token for the state that they are in.

Walking a model takes long in Python, and a step needs it several times. A few loops in C detect that nothing has
changed: every module has the same attributes, hooks, children and tensors. The check runs once per call. Results that
depend on the state are cached under the version, which is another object as soon as anything has changed.

Half of what a module holds are hook tables. torch gives every hook that is registered anywhere a number: while it has
given none, models without hooks still have none, and their tables need not be compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gemini.guards.base import ChangeGuard
from gemini.guards.functional_call import has_swapped_parameters
from gemini.guards.tensor_guards import TensorFacts
from gemini.pipe.model_guards import ObjectIdentities
from gemini.planner.preconditions import describe_inner_hooks

MISSING: Any = object()  # in the place of an attribute that does not exist
_TABLES, _VALUES = attrgetter("_modules", "_parameters"), methodcaller("values")
_HOOKS = attrgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FRAMES = (nn.Module, nn.ModuleDict, nn.ModuleList)
# Attributes of every module on which no call depends; hooks are compared separately.
_IDLE = frozenset(vars(nn.Module())) - {"training", "_parameters", "_buffers", "_modules"}
_OF_MODULES = frozenset(vars(nn.Module()))
_PLAIN = ("_modules", "_parameters", "_buffers")
_WALKS = ("modules", "named_modules", "children", "named_children", "parameters", "named_parameters", "_named_members")
Holds = Callable[[Any], bool]
_usual: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()  # classes
_hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that have had hooks


def _walks_as_usual(module: nn.Module) -> bool:
    """Return whether it reports its modules and parameters as nn.Module does: overrides may return anything."""
    cls = type(module)
    if cls not in _usual:
        _usual[cls] = all(getattr(cls, name) is getattr(nn.Module, name) for name in _WALKS)
    own = vars(module)
    has_tables = all(isinstance(own.get(name), dict) for name in _PLAIN)  # scripted modules have something similar
    return has_tables and _usual[cls] and own.keys().isdisjoint(_WALKS)


def _may_hold(value: Any) -> bool:
    """Return whether a deferred tensor may get into a value without replacing it."""
    if isinstance(value, tuple):
        return any(map(_may_hold, value))
    return isinstance(value, (list, dict, torch.Tensor))


class _Attributes:
    """Attributes of all modules that a call may depend on; modules with equal attribute names are compared together."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._spaces = [module.__dict__ for module in modules]
        self._sizes = [*map(len, self._spaces)]
        by_names: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for space in self._spaces:
            by_names.setdefault(tuple(name for name in space if name not in _IDLE), []).append(space)
        self._names = [*by_names]
        self._read = [(itemgetter(*names), spaces) for names, spaces in by_names.items()]
        self._values = [*self._now()]
        self._filled = [
            (space, name)
            for space in self._spaces
            for name, value in space.items()
            if _may_hold(value) and name not in _OF_MODULES
        ]

    def _now(self) -> Iterator[Any]:
        return chain.from_iterable(chain.from_iterable(map(read, spaces) for read, spaces in self._read))

    def are_same(self) -> bool:
        """Return whether all are the same objects."""
        try:
            return [*map(len, self._spaces)] == self._sizes and all(map(is_, self._now(), self._values))
        except KeyError:
            return False

    def then(self, is_deferred: Holds, is_ours: Holds) -> list[tuple[dict[str, Any], str, Any]] | None:
        """Return changed attributes and those with deferred values: table, name, former value; None if none are."""
        are_same = self.are_same()
        found = [(space, name, space[name]) for space, name in self._filled if is_deferred(space.get(name))]
        if are_same and not found:
            return None
        if not are_same:
            was = iter(self._values)
            for names, (_, spaces) in zip(self._names, self._read, strict=True):
                for space in spaces:
                    before = dict(zip(names, was, strict=False))
                    found += [
                        (space, name, before.get(name, MISSING))
                        for name, value in space.items()
                        if name not in _IDLE and value is not before.get(name, MISSING) and not is_ours(value)
                    ]
                    found += [(space, name, value) for name, value in before.items() if name not in space]
        return found


class _Hooks:
    """The hooks of all modules."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules, self._tables = modules, [*map(_HOOKS, modules)]
        self._inside = ObjectIdentities(chain.from_iterable(self._tables))
        self._each = [*chain.from_iterable(self._tables)]
        if any(self._each):
            _hooked.add(modules[0])
        self._has_had = modules[0] in _hooked  # removed tables may be put back
        self._last_hook_id = RemovableHandle.next_id

    def are_same(self) -> bool:
        """Return whether the hooks are the same objects."""
        if self._last_hook_id == RemovableHandle.next_id and not self._has_had and not any(self._each):
            return True  # `any` sees hooks that are written into a table by hand
        now = chain.from_iterable(map(_HOOKS, self._modules))
        found = all(map(is_, now, chain.from_iterable(self._tables))) and self._inside.are_unchanged()
        if found:
            self._last_hook_id = RemovableHandle.next_id
        return found


class ModelVersion(ChangeGuard):
    """The state of a model at one time."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = {*map(id, modules)}
        self._of_classes, self._classes = modules, [*map(type, modules)]
        self._attributes, self._hooks = _Attributes(modules), _Hooks(modules)
        buffers = [module._buffers for module in modules]
        self._tables = ObjectIdentities([*chain.from_iterable(map(_TABLES, modules)), *buffers])
        held = chain.from_iterable(map(_VALUES, (*(module._parameters for module in modules), *buffers)))
        self._facts = TensorFacts([tensor for tensor in held if tensor is not None])
        self.kinds: dict[Hashable, list[Any]] = {}  # of calls, by what distinguishes them within this version
        self.found: dict[Hashable, Any] = {}  # the kinds of single calls
        self.hooks: str | None = None  # on inner modules; None: not inspected yet

    def check(self, module: nn.Module) -> str | None:  # noqa: ARG002 - the model it was made for
        """Return that the model has changed, or None."""
        return None if self.holds() else "the model has changed"

    def holds(self) -> bool:
        """Return whether the model is still in it."""
        return (
            self._attributes.are_same()
            and self._tables.are_unchanged()
            and self._hooks.are_same()
            and self._facts.hold()
            and all(map(is_, map(type, self._of_classes), self._classes))
        )

    def then(self, is_deferred: Holds, is_ours: Holds) -> list[tuple[dict[str, Any], str, Any]] | None:
        """Return attributes that the script has changed, or filled with deferred values, and their former values.

        Attributes for which `is_ours` holds are left out. None if all are the same objects, training flags included.
        """
        return self._attributes.then(is_deferred, is_ours)

    def covers(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether nothing else can change in these modules; frames of generated code never do."""
        others = [type(one) for one in modules if id(one) not in self._modules]
        return all(one in _FRAMES or one.__module__.startswith("gemini") for one in others)


class ModelContents:
    """The modules and parameters of one model at one time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = list(model.modules())
        self.parameters = list(model.parameters())
        self.identities = tuple(map(id, self.parameters))
        self._has_swapped = has_swapped_parameters(self.parameters)
        tables = self._tables()
        self._sizes, self._held = [*map(len, tables)], [*chain.from_iterable(map(_VALUES, tables))]
        self.state = ModelVersion(self.modules) if all(map(_walks_as_usual, self.modules)) else None

    def _tables(self) -> list[dict[str, Any]]:
        return [*chain.from_iterable(map(_TABLES, self.modules))]

    def has_swapped(self) -> bool:
        """Return whether parameters are swapped in for one call."""
        self._has_swapped = self._has_swapped and has_swapped_parameters(self.parameters)  # or permanently
        return self._has_swapped

    def hooks(self) -> str:
        """Describe hooks on inner modules, '' if there are none: some may be registered after all plans were made."""
        if self.state is None:
            return describe_inner_hooks(self.model)
        if self.state.hooks is None:
            self.state.hooks = describe_inner_hooks(self.model)
        return self.state.hooks

    def is_current(self) -> bool:
        """Return whether the model still has these, in this order; if so, `state` is its current version."""
        if self.state is None:
            return False
        if self.state.holds():
            return True
        tables = self._tables()
        has_same = [*map(len, tables)] == self._sizes and all(
            map(is_, chain.from_iterable(map(_VALUES, tables)), self._held)
        )
        if has_same:
            self.state = ModelVersion(self.modules)
        return has_same


def read_contents(model: nn.Module, last: ModelContents | None) -> ModelContents:
    """Return the contents of a model; the last ones, if they are still current."""
    return last if last is not None and last.model is model and last.is_current() else ModelContents(model)
