"""Reach: follows code to everything that it can read or change, and stops at the first thing that is not pure.

    forward of a class ──► names in its bytecode ──► global, closure, default, import: the value itself
                                                 └─► attributes of objects in reach, by the names in all code in reach
    function of the script, or of an unknown library   followed
    function of torch, math, a trusted library …       allowed by name (`allowances`)
    number, string, dtype, enumeration, tensor         allowed, and watched for changes (`value_watch`)
    container                                          its items
    object of a Python class                           its attributes and methods that code names
    anything else                                      impure: a generator, an iterator, a file, a lock, a C object …

A value is *owned* if only the model holds it: an attribute of a module. Owned values may change, since they are saved
and restored around trial runs. A change of any other value (a global counter, a list around a function) is impure.
"""

from __future__ import annotations

import builtins
import inspect
import sys
import types
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from gemini.ir.hook_tables import hook_tables
from gemini.purity.allowances import (
    DENIED_METHODS,
    PLAIN,
    STATEFUL,
    is_allowed,
    is_denied,
    is_global_generator,
    is_of_library,
)
from gemini.purity.bytecode import functions_of, parts_of
from gemini.purity.code_reads import Change, NameChain, read_code
from gemini.purity.reach_state import ReachState
from gemini.purity.value_kinds import (
    IMPLIED,
    MADE_METHODS,
    MUTABLE,
    changes_self,
    defaults_of,
    implied_methods,
    is_code,
    is_followed,
    is_held_by_script,
    is_library_object,
    is_object,
    is_of_script,
    is_plain,
    may_change,
    names_called,
)
from gemini.purity.value_watch import (
    MISSING,
    ValueLocation,
    cells,
    members,
    slots,
)

_BUILTINS = frozenset(vars(builtins))  # before the script may have added some
_SLOTS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_INTERNAL = frozenset(vars(nn.Module()))


class Reach(ReachState):
    """What some code reaches: `entries` are watched values by id, `reason` names the first impure thing."""

    # ── starts ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def add_module(self, module: nn.Module, *, has_hooks: bool = True) -> None:
        """Add the forward, attributes and hooks of a module; one of a library only calls what the script gave it."""
        if isinstance(module, torch.jit.ScriptModule):  # compiled: it reaches only what it holds
            return
        self._objects.append(("self", module, True))
        self._add_class(type(module))
        given = [(name, value) for name, value in vars(module).items() if name not in _INTERNAL]
        hooks = [("a hook", hook) for table in hook_tables(module) for hook in table.values() if has_hooks]
        for name, value in (*filter(lambda one: is_held_by_script(one[1]), given), *hooks):
            self.add_value(f"{type(module).__name__}.{name}", value, is_own=True)

    def add_tensor(self, tensor: torch.Tensor) -> None:
        """Add the attributes of a parameter or buffer, and its class."""
        self._objects.append((type(tensor).__name__, tensor, True))
        self._add_class(type(tensor))

    def add_value(self, name: str, value: Any, *, is_own: bool) -> None:
        """Add a value that code uses."""
        self._where = self._where or name
        self._reach(name, value, is_own=is_own)

    def run(self) -> Reach:
        """Follow everything that was added, until nothing new is found."""
        while not self.reason:
            before = len(self._done), len(self._seen), len(self._names)
            while self._functions and not self.reason:
                self._follow(*self._functions.pop())
            for kind in [*self._classes]:
                self._visit_class(kind)
            for kind in [*self._libraries]:
                self._visit_additions(kind)
            for one in [*self._objects]:
                self._visit_object(*one)
            if not self._functions and before == (len(self._done), len(self._seen), len(self._names)):
                break
        if self._set and "pop" in self._names:  # which item that is depends on the earlier ones
            self._refuse(f"pops from {self._set}")
        for name in sorted(self._stored & self._read.keys()):
            self._refuse(f"may change {self._read[name]}")
        return self

    # ── functions ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _follow(self, function: types.FunctionType, kind: type | None) -> None:
        self._reach(function.__name__, getattr(function, "__wrapped__", None), is_own=False)
        if not is_followed(function.__globals__.get("__name__")):  # a decorator of a library calls what it holds
            for name, held in cells(function).items():
                self._reach(name, held, is_own=False)
            return
        self._where = function.__qualname__.replace("<locals>.", "")
        reads = read_code(function.__code__)
        self.follows_code = True
        self._names |= reads.attributes | reads.strings
        if denied := reads.attributes & DENIED_METHODS:
            self._refuse(f"calls {min(denied)}")
        self._asked |= reads.strings
        self._stored |= reads.stored_attributes | (reads.self_stores if kind is None else frozenset())
        self._takes_any = self._takes_any or reads.is_dynamic
        if reads.stored_globals:
            self._refuse(f"assigns the global {min(reads.stored_globals)}")
        if reads.stored_cells:
            self._refuse(f"assigns {min(reads.stored_cells)}, a variable around it")
        around, defaults = cells(function), defaults_of(function)
        for chain in sorted(reads.chains):
            if chain.root == "global":
                self._resolve_global(function, chain)
            elif chain.root == "import":
                self._resolve_import(function, chain)
            elif chain.root == "self" and kind is not None:
                self._check_class_write(chain, kind)
            elif chain.root == "closure" and chain.names[0] in around and chain.names[0] != "__class__":
                if not self._is_own(around[chain.names[0]]):
                    self._note(chain.names[0], ValueLocation(function, chain.names[0], cells))
                self._descend(chain, around[chain.names[0]])
            elif chain.root == "default" and chain.names[0] in defaults:
                self._descend(chain, defaults[chain.names[0]])
        for name, value in defaults.items():
            if not is_plain(value):
                self._note(name, ValueLocation(function, name, defaults_of))
                self._reach(name, value, is_own=False)
        self._objects.append((function.__name__, function, False))

    def _resolve_global(self, function: types.FunctionType, chain: NameChain) -> None:
        space, name = function.__globals__, chain.names[0]
        if name == "__gemini__":  # of instrumented code
            return
        if name in space:
            value = space[name]
            if not isinstance(value, types.ModuleType):
                self._note(name, ValueLocation(space, name))
            self._descend(chain, value)
        elif hasattr(builtins, name):
            value = getattr(builtins, name)
            if name not in _BUILTINS:  # the script has added it
                self._refuse_value(name, f"builtins.{name}")
            if value not in (hash, id) or function.__name__ != "__hash__":  # whose result only finds a place in a table
                self._reach(name, value, is_own=False)
        else:
            self._note(name, ValueLocation(space, name))

    def _resolve_import(self, function: types.FunctionType, chain: NameChain) -> None:
        name = chain.names[0]
        module = sys.modules.get(name) or sys.modules.get(f"{function.__globals__.get('__package__')}.{name}")
        if module is not None:
            for one in (module, sys.modules.get(name.partition(".")[0])):  # `import a.b` binds a
                self._descend(chain if hasattr(one, chain.names[-1]) else chain._replace(names=(name,)), one)
        elif not is_allowed(name) and not is_of_library(name):
            self._refuse(f"imports {name}")

    def _descend(self, chain: NameChain, value: Any) -> None:
        """Follow a chain from the value of its first name through modules; attributes of objects follow by name."""
        text, rest = chain.names[0], [*chain.names[1:]]
        while isinstance(value, types.ModuleType) and rest:
            module, name = value, rest.pop(0)
            text = f"{text}.{name}"
            value = vars(module).get(name, MISSING)
            if value is MISSING:  # loaded when it is first used, or computed
                self._reach(module.__name__, vars(module).get("__getattr__"), is_own=False)
                value = getattr(module, name, MISSING) if not is_followed(module.__name__) else MISSING
            if is_followed(type(module).__module__):  # its class may compute attributes
                self._add_object(text, module, is_own=False)
            if isinstance(value, types.ModuleType):
                continue
            if is_followed(module.__name__) or isinstance(value, (*MUTABLE, *PLAIN)):
                self._read.setdefault(name, text)
                self._note(text, ValueLocation(vars(module), name))
            if not is_followed(module.__name__):
                if is_allowed(f"{module.__name__}.{name}") and not is_of_script(value):
                    held = inspect.getattr_static(value, rest[0], MISSING) if rest else MISSING
                    if is_of_script(held):
                        self._reach(f"{text}.{rest[0]}", held, is_own=False)
                    if not module.__name__.startswith("torch"):  # whose replaced functions are found in every call
                        self._note(text, ValueLocation(vars(module), name))
                    return
                # of this process, as sys.argv, or put there by the script
                is_state = (isinstance(value, MUTABLE) or is_of_script(value)) and not is_of_library(module.__name__)
                is_generator = is_global_generator(getattr(value, "__self__", None))
                if is_state or (is_denied(f"{module.__name__}.{name}") and not is_generator):
                    self._refuse_value(text, f"{module.__name__}.{name}")
        if value is MISSING:
            return
        self._reach(text, value, is_own=False, change=Change.READ if rest else chain.change)
        self._descend_attributes(text, value, rest, chain.change)

    def _descend_attributes(self, text: str, value: Any, names: list[str], change: Change) -> None:
        """Follow a chain through objects: an attribute that is missing may be set, one that code changes is refused."""
        for at, name in enumerate(names):
            if self._is_own(value) or isinstance(value, (type, types.ModuleType, torch.Tensor)):
                return
            if name not in members(value):
                if is_object(value) and type(value).__dictoffset__:
                    self._note(f"{text}.{name}", ValueLocation(value, name, vars))
                return
            text, value = f"{text}.{name}", members(value)[name]
            if at == len(names) - 1 and may_change(value, change) and not self._is_own(value):
                self._refuse(f"changes {text}")

    def _check_class_write(self, chain: NameChain, kind: type) -> None:
        """Refuse a change of a container that belongs to a class, through an object of it."""
        held = next((vars(one)[chain.names[0]] for one in kind.__mro__ if chain.names[0] in vars(one)), None)
        if chain.change and len(chain.names) == 1 and isinstance(held, MUTABLE) and not self._shadows(chain, kind):
            self._refuse(f"changes {kind.__name__}.{chain.names[0]}")

    def _shadows(self, chain: NameChain, kind: type) -> bool:
        return any(isinstance(one, kind) and chain.names[0] in members(one) for _, one, _ in self._objects)

    # ── classes and objects ────────────────────────────────────────────────────────────────────────────────────────
    # ── classes and objects ────────────────────────────────────────────────────────────────────────────────────────
    def _visit_class(self, kind: type) -> None:
        """Visit the members of a class that code names, and note that it has none of those that it inherits."""
        called = {name for one in kind.__mro__ if not is_followed(one.__module__) for name in names_called(one)}
        inherited = {name for one in kind.__mro__[1:] for name in self._names & vars(one).keys()}
        for name in (inherited | self._asked_names()) - vars(kind).keys():
            self._note(f"{kind.__name__}.{name}", ValueLocation(kind, name, vars))
        for name in self._named(vars(kind), called | (MADE_METHODS if kind in self._made else frozenset())):
            if (id(kind), name) in self._done or isinstance(vars(kind)[name], _SLOTS):
                continue
            self._done.add((id(kind), name))
            member = vars(kind)[name]
            functions = [*functions_of(member)]
            self._note(f"{kind.__name__}.{name}", ValueLocation(kind, name, vars))
            self._functions += [(one, kind) for one in functions if is_followed(one.__module__)]
            for part in parts_of(member) if functions else (member,):
                self._reach(f"{kind.__name__}.{name}", part, is_own=False)

    def _visit_additions(self, kind: type) -> None:
        """Visit what the script has put into a class of a library, if code names it."""
        for name in sorted(self._names & vars(kind).keys()):
            if (id(kind), name) not in self._done:
                self._done.add((id(kind), name))
                if is_of_script(value := vars(kind)[name]):
                    self._reach(f"{kind.__name__}.{name}", value, is_own=False)

    def _visit_object(self, text: str, value: Any, is_own: bool) -> None:
        """Visit the attributes of an object that code names."""
        for root in {kind.__module__.partition(".")[0] for kind in type(value).__mro__} & STATEFUL.keys():
            if stateful := self._names & STATEFUL[root] - members(value).keys():
                self._refuse_value(f"{text}.{min(stateful)}", f"of {root}")
        for read in (members, slots):
            found = read(value)
            for name in self._named(found):
                if (id(value), name) in self._done or (isinstance(value, nn.Module) and name in _INTERNAL):
                    continue
                self._done.add((id(value), name))
                if not is_own:
                    self._read.setdefault(name, f"{text}.{name}")
                    place = ValueLocation(value, name, vars if read is members else read)
                    self._note(f"{text}.{name}", place)
                self._reach(f"{text}.{name}", found[name], is_own=is_own)
        if not is_own or is_library_object(value):  # whose state is not restored after trial runs
            self._check_object_writes(text, value)

    def _check_object_writes(self, text: str, value: Any) -> None:
        """Refuse methods in reach that change an object which the model does not own."""
        is_ours = is_followed(type(value).__module__)
        for kind in type(value).__mro__ if is_ours or is_library_object(value) else ():
            names = self._names | implied_methods(vars(kind)) if is_ours else self._names - IMPLIED
            for name in names & vars(kind).keys() - MADE_METHODS:
                for reads in (read_code(one.__code__) for one in functions_of(vars(kind)[name])):
                    if changes_self(reads, value):
                        self._refuse(f"calls {text}.{name}, which changes it")
        if isinstance(value, (nn.Module, types.FunctionType, types.ModuleType)):
            return
        for name in self._asked_names() - members(value).keys() if type(value).__dictoffset__ else ():
            self._note(f"{text}.{name}", ValueLocation(value, name, vars))

    def _asked_names(self) -> set[str]:
        """Return the attributes that code may query and that an object may not have."""
        names = self._names if self._takes_any else self._asked
        return {name for name in names if not name.startswith("__")}

    def _named(self, table: Mapping[str, Any], more: Collection[str] = ()) -> list[str]:
        """Return the names in a table that code in reach uses."""
        if self._takes_all:
            return sorted(name for name in table if name[:2] != "__" or name in self._names)
        names = (self._names - MADE_METHODS).union(more) | implied_methods(table)
        if not self._takes_any:
            return sorted(names & table.keys())
        return sorted(name for name in table if name in names or not (name[:2] == "__" or is_code(table[name])))
