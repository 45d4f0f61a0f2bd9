"""Value kinds: how the purity proof treats a value, by its type and by the module that this type comes from."""

from __future__ import annotations

import argparse
import collections
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from gemini.purity.allowances import (
    CONTAINERS,
    LIBRARIES,
    OPS,
    PLAIN,
    is_allowed,
    is_global_generator,
    is_of_library,
    is_value_type,
)
from gemini.purity.bytecode import functions_of
from gemini.purity.code_reads import Change, CodeReads, read_code
from gemini.purity.value_watch import MISSING, members

MEMOIZED = functools._lru_cache_wrapper
COMPILED = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
MUTABLE = (
    list, dict, set, deque, bytearray, np.ndarray, torch.Tensor, collections.UserDict, collections.UserList,
    collections.ChainMap,
)  # fmt: skip
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
MADE_METHODS = frozenset(
    ["__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__"]
)  # run on a new object
IMPLIED = frozenset(["__getattr__", "__getattribute__", "__setattr__"])  # run for every attribute
_SOURCES = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
_UNUSED = frozenset(
    ["__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__"]
)


def is_followed(module: str | None) -> bool:
    """Return whether code of a module is followed: the script's, and that of unknown libraries in Python."""
    name = module or "__main__"
    root = name.partition(".")[0]
    if name == "__main__":
        return True
    if root in sys.stdlib_module_names or root in LIBRARIES or root == "numpy":
        return False
    file = members(sys.modules.get(name)).get("__file__") or ".py"
    return str(file).endswith((".py", ".pyc"))


def is_object(value: Any) -> bool:
    """Return whether a value holds attributes that are followed."""
    if isinstance(value, (type, nn.Module, types.FunctionType, *CONTAINERS)):
        return False
    return isinstance(value, NAMESPACES) or is_followed(type(value).__module__)


def is_object_type(kind: type) -> bool:
    """Return whether objects of a class that is not followed hold nothing but values, and their methods are pure."""
    return is_allowed(f"{kind.__module__}.{kind.__qualname__}") or is_value_type(kind)


def is_library_object(value: Any) -> bool:
    """Return whether a value is an object of a trusted library that may have state, and that nothing restores."""
    held = isinstance(value, (type, nn.Module, torch.Tensor, types.FunctionType, types.ModuleType, Enum, *CONTAINERS))
    return not held and is_of_library(type(value).__module__)


def find_given(values: Iterable[Any], depth: int = 3) -> Iterator[Any]:
    """Yield generators of random numbers and code of the script among values, and in what these hold."""
    for value in values:
        if isinstance(value, _SOURCES):
            if not is_global_generator(value) and value is not torch.default_generator:
                yield value
        elif is_held_by_script(value):
            yield value
        elif depth and not isinstance(value, (nn.Module, torch.Tensor, type, types.ModuleType, *PLAIN)):
            inside = value.values() if isinstance(value, Mapping) else value
            yield from find_given([*inside] if isinstance(value, CONTAINERS) else [*members(value).values()], depth - 1)


def is_script_op(value: Any) -> bool:
    """Return whether a value is an op with kernels that a script has written in Python (`torch.library`)."""
    if not isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False
    space, name, *_ = str(value).split(".")
    kernels = (one.rpartition("/") for one in torch.library._impls)
    names = {op.partition(".")[0] for op, _, key in kernels if key != "Meta"}
    return f"{space}/{name}" in names and space not in OPS


def is_python_ufunc(value: Any) -> bool:
    """Return whether a value is a function of arrays that calls Python (`np.frompyfunc`)."""
    return isinstance(value, np.ufunc) and all(set(one) <= set("O->") for one in value.types)


def may_change(value: Any, change: Change) -> bool:
    """Return whether code that does this to a value may change it."""
    if change is Change.CHANGED_INSIDE and isinstance(value, CONTAINERS):
        items: Iterable[Any] = value.values() if isinstance(value, Mapping) else value
        return any(isinstance(item, (*MUTABLE, tuple)) or is_object(item) for item in items)
    return (
        bool(change) and not isinstance(value, Enum) and (isinstance(value, (*MUTABLE, MEMOIZED)) or is_object(value))
    )


def is_plain(value: Any) -> bool:
    """Return whether a value never changes and runs no code of the script, as a subclass or an enumeration may."""
    return isinstance(value, PLAIN) and not is_followed(type(value).__module__)


def implied_methods(table: Mapping[str, Any]) -> set[str]:
    """Return the special methods in a table of a class, which code calls without naming them."""
    found = {name for name in table if name[:2] == name[-2:] == "__" or name == "_missing_"} - MADE_METHODS - _UNUSED
    return {name for name in found if is_code(table[name])}


@functools.lru_cache(maxsize=4096)
def names_called(kind: type) -> frozenset[str]:
    """Return the attributes that code of a library names when a module of this class is called."""
    found: set[str] = set()
    waiting = ["__call__", "forward"]
    while waiting:
        name = waiting.pop()
        functions = [one for base in kind.__mro__ for one in functions_of(vars(base).get(name))]
        new = {attribute for one in functions for attribute in read_code(one.__code__).attributes} - found
        found |= new
        waiting += new
    return frozenset(found)


def is_code(member: Any) -> bool:
    """Return whether a member of a class is code."""
    return any(True for _ in functions_of(member)) or isinstance(member, (staticmethod, classmethod))


def changes_self(reads: CodeReads, owner: Any) -> bool:
    """Return whether a method that reads and writes this changes the object that it is called on."""
    held = members(owner)
    written = [name for chain in reads.chains if chain.root == "self" and chain.change for name in chain.names[:1]]
    return bool(reads.self_stores) or any(isinstance(held.get(name), MUTABLE) for name in written)


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the default arguments of a function, by name."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    return {**dict(zip(names[len(names) - len(values) :], values, strict=False)), **(function.__kwdefaults__ or {})}


def is_of_script(value: Any) -> bool:
    """Return whether a value under a name of a library may have been put there by the script."""
    if isinstance(value, types.BuiltinMethodType):  # of an object; functions of modules and classes are no methods
        owner = value.__self__
        is_method = not (isinstance(owner, (type, types.ModuleType, type(None))) or is_global_generator(owner))
        return is_method and is_of_script(owner)
    if isinstance(value, functools.partial):
        return any(map(is_of_script, (value.func, *value.args, *value.keywords.values())))
    if is_script_op(value):
        return True
    if value is MISSING or isinstance(value, (types.ModuleType, property, staticmethod, classmethod, *COMPILED)):
        return False
    if isinstance(value, (types.FunctionType, type)):
        return is_followed(value.__module__)
    if isinstance(value, (tuple, frozenset)):
        return any(map(is_of_script, value))
    kind = type(value)
    is_known = is_allowed(f"{kind.__module__}.{kind.__qualname__}") or is_value_type(kind)
    return isinstance(value, (*CONTAINERS, *MUTABLE)) or not (is_plain(value) or is_known)


def is_held_by_script(value: Any) -> bool:
    """Return whether an attribute of a library's module is code of the script: a function, or a callable object."""
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, functools.partial):
        return is_held_by_script(value.func)
    if isinstance(value, types.FunctionType):
        return is_followed(value.__module__)
    return (
        callable(value)
        and not isinstance(value, (type, nn.Module, torch.Tensor))
        and is_followed(type(value).__module__)
    )
