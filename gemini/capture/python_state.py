"""Python state: a fingerprint of the part of a model's Python state that its glue may branch on.

It covers `self.training`, configurations, children of containers, replaced forwards, hooks, and the attributes of
modules and their classes that the glue reads, written `attribute@module`: flags, numbers, names, functions, contents
of containers and plain objects. A graph is valid only while the fingerprint is equal. A counter that no forward reads
does not count, nor does the state of opaque modules, whose Python runs in every call. Exceptions:

- rates of 0 or 1, at which an opaque module uses no random numbers;
- of opaque modules that use random numbers, whether their rates are 0 or 1, `attribute?@module`;
- settings of torch's layers (`Softmax.dim`, `Embedding.scale_grad_by_freq`), on which proofs about samples depend.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import nn

from gemini.ir.encode import attributes
from gemini.ir.hook_tables import has_hooks
from gemini.snapshot.attribute_values import callable_state

_RATE_ONLY = "?"  # suffix of an attribute of which only counts whether it is 0 or 1
_PLAIN = (bool, int, float, str, type(None))
_SETTINGS = (bool, int, str, tuple, type(None))
_LAYERS = "torch.nn.modules."
_EVERY = frozenset(vars(nn.Module()))  # attributes that every module has
_MAX_DEPTH, _MAX_ITEMS = 3, 256  # of the contents of an object that count
_MAX_BYTES = 1 << 20  # of an array whose contents count


def glue_modules(model: nn.Module, whole: Iterable[str]) -> list[str]:
    """Return the modules that are not inside a leaf or block."""
    opaque = set(whole)
    return [name for name, _ in model.named_modules() if not _is_inside(name, opaque)]


def _is_inside(name: str, opaque: set[str]) -> bool:
    """Return whether a module is one of these or inside one."""
    parts = name.split(".")
    return "" in opaque or any(".".join(parts[:count]) in opaque for count in range(1, len(parts) + 1))


def fingerprint(model: nn.Module, names: Iterable[str]) -> tuple[Any, ...]:
    """Return a value that differs when the Python of these modules may take another branch."""
    facts: list[Any] = []
    configurations: dict[int, Any] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if "@" in name:
            facts.append((name, *_read_attribute(modules, name)))
            continue
        module = modules.get(name)
        if module is None:
            facts.append((name, "gone"))
            continue
        own = vars(module)
        facts.append(
            (
                name,
                (("training", module.training),),
                tuple((key, id(child)) for key, child in module._modules.items()),
                tuple((key, buffer is None) for key, buffer in module._buffers.items()),
                tuple(key for key, parameter in module._parameters.items() if parameter is not None),
                _forward(own.get("forward")),
                bool(name) and has_hooks(module),  # those on the model itself run around the graph
            )
        )
        config = own.get("config")
        if config is not None and hasattr(config, "__dict__"):
            configurations[id(config)] = config
    facts.append(
        (
            ("default", str(torch.get_default_dtype())),
            *((name, f"{p.dtype} {p.device} {p.requires_grad} {[*p.shape]}") for name, p in model.named_parameters()),
            *((name, f"{b.dtype} {b.device} {[*b.shape]}") for name, b in model.named_buffers()),
            *((f"class of {name}", type(module).__qualname__) for name, module in modules.items()),
        )
    )
    for config in configurations.values():
        facts.append(config_facts(config))
    return tuple(facts)


def branch_reads(touched: Iterable[tuple[str, str]], model: nn.Module) -> list[str]:
    """Return the attributes that the glue reads, `attribute@module`, and may branch on."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = set()
    for name, key in touched:
        module = modules[name]
        held = (module._parameters, module._buffers, module._modules)
        if any(key in space for space in held) or "@" in name or (key == "config" and key in vars(module)):
            continue
        value = _attribute(module, key)
        code = (torch.Tensor, types.FunctionType, property, classmethod, staticmethod, functools.cached_property)
        if key in vars(module) or not isinstance(value, code):
            found.add(f"{key}@{name}")
    return sorted(found)


def idle_rates(model: nn.Module, quiet: Iterable[str]) -> list[str]:
    """Return the rates of 0 or 1, `attribute@module`, of these opaque modules, which used no random numbers.

    A dropout of 0 or 1 uses none; with another rate it does, and needs another graph.
    """
    return [f"{key}@{name}" for key, name, value in _numbers_in(model, quiet) if value in (0, 1)]


def active_rates(model: nn.Module, drawing: Iterable[str]) -> list[str]:
    """Return the rates of these opaque modules, which use random numbers: with 0 or 1 they would not."""
    return [f"{key}{_RATE_ONLY}@{name}" for key, name, value in _numbers_in(model, drawing) if 0 < value < 1]


def _numbers_in(model: nn.Module, wholes: Iterable[str]) -> Iterator[tuple[str, str, float]]:
    """Yield attribute, module and value of all numbers in some modules and their children."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for whole in dict.fromkeys(wholes):
        for name, module in modules.items():
            if name == whole or name.startswith(f"{whole}.") or not whole:
                for key, value in vars(module).items():
                    if isinstance(value, (int, float)) and not isinstance(value, bool):
                        yield key, name, value


def layer_settings(model: nn.Module, whole: Iterable[str]) -> list[str]:
    """Return the settings, `attribute@module`, of torch's layers among these opaque modules and inside them.

    Floats do not count: with another rate or epsilon, a layer treats samples the same.
    """
    opaque = set(whole)
    return [
        f"{key}@{name}"
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module).__module__.startswith(_LAYERS) and _is_inside(name, opaque)
        for key, value in vars(module).items()
        if isinstance(value, _SETTINGS) and key not in _EVERY
    ]


def changeable_reads(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return those reads whose value may change while the attribute is the same object."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = []
    for name in names:
        key, sign, owner = name.partition("@")
        if sign and owner in modules:
            own = vars(modules[owner])
            fixed = (*_PLAIN, nn.Module, torch.Tensor, types.FunctionType, tuple, frozenset)
            if (key in own and not isinstance(own[key], fixed)) or hasattr(type(modules[owner]), key):
                found.append(name)
    return found


def read_facts(modules: dict[str, nn.Module], names: Iterable[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the current facts of these reads."""
    return [_read_attribute(modules, name) for name in names]


def config_facts(config: Any, *, changeable: bool = False) -> tuple[tuple[str, str], ...]:
    """Return the facts of a configuration; with `changeable`, only of values that may change in place."""
    values = vars(config).items()
    return tuple((k, repr(_value_facts(v, [], 1))) for k, v in values if not (changeable and isinstance(v, _PLAIN)))


def _attribute(module: nn.Module, key: str) -> Any:
    """Return the attribute of a module or of its class, without running code."""
    own = vars(module)
    return own[key] if key in own else inspect.getattr_static(type(module), key, _GONE)


_GONE = "gone"


def _read_attribute(modules: dict[str, nn.Module], name: str) -> tuple[str, tuple[int, ...]]:
    """Return an attribute as text, and the ids of objects that text does not identify."""
    key, _, owner = name.partition("@")
    if owner not in modules:
        return _GONE, ()
    found: list[int] = []
    if key.endswith(_RATE_ONLY):
        value = _attribute(modules[owner], key.removesuffix(_RATE_ONLY))
        return repr(isinstance(value, (int, float)) and value in (0, 1)), ()
    return repr(_value_facts(_attribute(modules[owner], key), found, 0)), tuple(found)


def _value_facts(value: Any, found: list[int], depth: int) -> Any:
    if isinstance(value, (*_PLAIN, complex, bytes, torch.dtype, torch.device, torch.Size)):
        return value
    if isinstance(value, (torch.Tensor, nn.Module)):
        found.append(id(value) if isinstance(value, nn.Module) else 0)
        return type(value).__name__
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, crc32(value.tobytes()) if value.nbytes <= _MAX_BYTES else 0
    if isinstance(value, functools.partial):
        return "partial", [_value_facts(part, found, depth + 1) for part in (value.func, value.args, value.keywords)]
    if callable(value):
        found.append(id(value))
        name = getattr(value, "__module__", ""), getattr(value, "__qualname__", type(value).__qualname__)
        code = (
            (_code(value.__code__),) if isinstance(value, types.FunctionType) else ()
        )  # two lambdas may have one name
        around = callable_state(value) if depth <= _MAX_DEPTH else []
        return (*name, *code, *(_value_facts(part, found, depth + 1) for part in around))
    if isinstance(value, (list, tuple, set, frozenset, dict, deque)):
        if depth > _MAX_DEPTH or len(value) > _MAX_ITEMS:
            return type(value).__name__, len(value)
        items: Any = value.items() if isinstance(value, dict) else value
        facts = [_value_facts(part, found, depth + 1) for part in items]
        return type(value).__name__, facts if isinstance(value, (list, tuple, dict, deque)) else sorted(facts, key=repr)
    own = attributes(value)
    if depth > _MAX_DEPTH or not own or len(own) > _MAX_ITEMS:
        return type(value).__name__
    return type(value).__name__, [(key, _value_facts(part, found, depth + 1)) for key, part in own.items()]


@functools.lru_cache(maxsize=1024)
def _code(code: types.CodeType) -> str:
    """Return a digest of a code object, the same in every process."""
    constants = [_code(one) if isinstance(one, types.CodeType) else _constant(one) for one in code.co_consts]
    facts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)
    return hashlib.sha1(repr(facts).encode(), usedforsecurity=False).hexdigest()[:12]


def _constant(value: Any) -> str:
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)  # sets have no order


def _forward(replaced: Any) -> int | None:
    """Return the id of a forward set on the instance; that of a running graph counts as the one it replaces."""
    replaced = getattr(replaced, "__gemini_stands_for__", replaced)
    return None if replaced is None else id(replaced)
