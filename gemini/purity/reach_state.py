"""Reached values: the values that some code uses, sorted by whether they are pure, and what is recorded of them.

The first impure value ends the proof. Functions, classes and objects are recorded, to be followed by `Reach`.
"""

from __future__ import annotations

import collections
import functools
import io
import operator
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from gemini.purity.allowances import (
    CONTAINERS,
    is_allowed,
    is_global_generator,
    is_of_library,
    is_value_type,
)
from gemini.purity.code_reads import Change
from gemini.purity.value_kinds import (
    COMPILED,
    IMPLIED,
    MEMOIZED,
    find_given,
    is_followed,
    is_library_object,
    is_object,
    is_object_type,
    is_plain,
    is_python_ufunc,
    is_script_op,
    may_change,
)
from gemini.purity.value_watch import (
    ValueLocation,
    WatchedValue,
    find_incomparable,
    members,
    memoized_results,
    watch,
)

_FUNCTION_PARTS = frozenset(["forward", "backward", "setup_context", "jvp", "vmap"])  # of an autograd function


class ReachState:
    """What has been reached so far, and what is still to be followed."""

    def __init__(self, own: Collection[int] = (), *, takes_all: bool = False) -> None:
        self.reason = ""
        self.entries: dict[int, WatchedValue] = {}
        self._own = own  # modules and tensors of the model, by id
        self._takes_all = takes_all  # attributes and methods count whether or not code names them
        self._names: set[str] = {"forward", "__call__", *IMPLIED}
        self.follows_code = False  # some function has been followed
        self._takes_any = False  # some code takes attributes by computed names
        self._asked: set[str] = set()  # attributes that code takes by strings, and that may be missing
        self._stored: set[str] = set()  # attributes that code sets, of unknown objects
        self._set = ""  # a set in reach
        self._read: dict[str, str] = {}  # attributes of objects that the model does not own, with a text for each
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # what `_seen` identifies
        self._functions: list[tuple[types.FunctionType, type | None]] = []
        self._classes: list[type] = []
        self._libraries: dict[type, None] = {torch.Tensor: None}  # classes of libraries
        self._made: set[type] = set()  # classes that code may instantiate, and their bases
        self._objects: list[tuple[str, Any, bool]] = []  # name, object, whether it is owned
        self._done: set[tuple[int, str]] = set()  # members that have been visited
        self._where = ""

    def _add_class(self, kind: type) -> None:
        for one in kind.__mro__:
            if not is_followed(one.__module__):
                self._libraries.setdefault(one)
                if not is_object_type(one):  # a subclass of a generator, a stream, a lock …
                    self._refuse_value(kind.__name__, f"{one.__module__}.{one.__qualname__}")
            elif one not in self._classes:
                self._classes.append(one)
                self._add_class(type(one))

    # ── values ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _reach(self, text: str, value: Any, *, is_own: bool, change: Change = Change.READ) -> None:
        if self.reason or is_plain(value):
            return
        if may_change(value, change) and not is_own and not self._is_own(value):
            self._refuse(f"changes {text}")
        if isinstance(value, types.MethodType):
            if not is_global_generator(value.__self__):
                self._reach(text, value.__self__, is_own=is_own)
                self._reach(text, value.__func__, is_own=is_own)
            return
        if id(value) in self._seen or id(value) in self._own:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, CONTAINERS):
            self._reach_items(text, value, is_own)
        elif isinstance(value, (types.FunctionType, MEMOIZED, functools.partial, *COMPILED)):
            self._reach_callable(text, value, is_own)
        elif isinstance(value, type):
            self._reach_class(text, value)
        elif isinstance(value, nn.Module):
            self._reach_module(text, value)
        else:
            self._reach_object(text, value, is_own)

    def _reach_items(self, text: str, value: Any, is_own: bool) -> None:
        self._set = text if isinstance(value, set) else self._set
        items: Iterable[Any] = (*value, *value.values()) if isinstance(value, Mapping) else value
        if isinstance(value, collections.defaultdict):
            self._reach(text, value.default_factory, is_own=is_own)
        for item in items:
            if not is_plain(item):
                self._reach(f"an item of {text}", item, is_own=is_own)
        if type(value) not in CONTAINERS and is_followed(type(value).__module__):
            self._add_object(text, value, is_own)

    def _reach_callable(self, text: str, value: Any, is_own: bool) -> None:
        if isinstance(value, MEMOIZED):
            self._reach(text, value.__wrapped__, is_own=is_own)
            results = memoized_results(value)
            for key in results:
                self._note(f"a result of {text}", ValueLocation(results, key))
                self._reach(f"a result of {text}", results[key], is_own=False)
        elif isinstance(value, functools.partial):
            self._names |= {part for part in value.args if isinstance(part, str)}  # partial(getattr, options, "tau")
            for part in (value.func, *value.args, *value.keywords.values()):
                self._reach(text, part, is_own=is_own)
        elif isinstance(value, types.FunctionType):
            if is_followed(value.__module__) or (value.__closure__ and not is_of_library(value.__module__)):
                self._functions.append((value, None))
            elif not is_of_library(value.__module__) and not is_allowed(f"{value.__module__}.{value.__name__}"):
                self._refuse_value(text, f"{value.__module__}.{value.__qualname__}")
        else:
            self._reach_compiled(text, value)

    def _reach_compiled(self, text: str, value: Any) -> None:
        """Check a function in C by the module it is from; a method of an object, by the object."""
        owner = getattr(value, "__self__", None)
        if is_global_generator(owner):
            return
        module = value.__module__ if isinstance(getattr(value, "__module__", None), str) else ""
        if not module:
            kind = getattr(value, "__objclass__", None) or (owner if isinstance(owner, type) else type(owner))
            module = str(kind.__module__)
        if isinstance(owner, type) and is_followed(owner.__module__):
            self._reach_class(text, owner)
        elif owner is not None and not isinstance(owner, (type, types.ModuleType)) and not module.startswith("torch"):
            self._reach(text, owner, is_own=False, change=Change.CHANGED)
        elif not is_of_library(module) and not is_allowed(f"{module}.{value.__name__}"):
            self._refuse_value(text, f"{module}.{value.__name__}")

    def _reach_class(self, text: str, kind: type) -> None:
        if is_followed(kind.__module__):
            self._names |= _FUNCTION_PARTS if issubclass(kind, torch.autograd.Function) else frozenset()
            self._add_class(kind)
            self._made.update(kind.__mro__)
            for member in kind if issubclass(kind, Enum) else ():
                self._reach(f"{text}.{member.name}", member, is_own=False)
        elif not (is_allowed(f"{kind.__module__}.{kind.__qualname__}") or is_value_type(kind)):
            self._refuse_value(text, f"{kind.__module__}.{kind.__qualname__}")

    def _reach_module(self, text: str, module: nn.Module) -> None:
        if any(one.requires_grad for one in module.parameters()):
            self._refuse(f"reads {text}, which has weights and is not part of the model")
        for part in module.modules():
            self._add_object(text, part, is_own=False)

    def _reach_object(self, text: str, value: Any, is_own: bool) -> None:
        kind = type(value)
        if isinstance(value, types.ModuleType):
            if is_followed(value.__name__) or not (is_allowed(value.__name__) or is_of_library(value.__name__)):
                self._objects.append((text, value, is_own))
        elif isinstance(value, torch.Tensor) and not is_followed(kind.__module__):
            if value.requires_grad and not is_own:
                self._refuse(f"reads {text}, which requires a gradient and is not part of the model")
            self._objects += [(text, value, is_own)] if members(value) else []
        elif is_global_generator(value):
            return
        elif isinstance(value, np.ndarray):
            if value.dtype.hasobject or isinstance(value, np.memmap):
                self._refuse_value(text, "an array of Python objects or of a file")
        elif is_object(value) and not isinstance(value, io.IOBase):
            self._add_object(text, value, is_own)
        elif kind in (operator.attrgetter, operator.methodcaller):
            self._names |= {name for part in value.__reduce__()[1] for name in str(part).split(".")}
        elif is_script_op(value):
            self._refuse_value(text, "an op written in Python")
        elif isinstance(value, Iterator) or not is_value_type(kind) or is_python_ufunc(value):
            self._refuse_value(text, f"{kind.__module__}.{kind.__qualname__}")
        elif is_library_object(value) and (held := members(value)):
            # Its methods are trusted, if they leave it as it is; its attributes may change: a configuration.
            for given in find_given(held.values()):
                self._reach(f"what {text} holds", given, is_own=is_own)
            self._objects.append((text, value, is_own))

    def _add_object(self, text: str, value: Any, is_own: bool) -> None:
        if isinstance(value, Enum):
            self._reach(text, value._value_, is_own=is_own)
        self._objects.append((text, value, is_own))
        self._add_class(type(value))

    def _is_own(self, value: Any) -> bool:
        """Return whether a value is a part of the model, or a container of its parts."""
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        return any(id(item) in self._own for item in items)

    def _note(self, name: str, place: ValueLocation) -> None:
        """Watch a value at a place for changes."""
        entry = watch(name, place)
        self.entries[id(entry)] = entry
        if reason := find_incomparable(entry.value):
            self._refuse(f"reads {name}, which has {reason}")

    def _refuse_value(self, text: str, kind: str) -> None:
        self._refuse(f"uses {text}" if kind.endswith(f".{text}") else f"uses {text} ({kind})")

    def _refuse(self, what: str) -> None:
        self.reason = self.reason or f"{self._where} {what}"
