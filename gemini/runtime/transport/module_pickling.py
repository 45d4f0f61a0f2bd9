"""Module pickling: what Python cannot pickle of a module, and what must not travel to a worker.

Hooks of a remote module itself run in the controller, around the call, so it is sent without them. A parametrized
module has a generated class that refuses to be pickled: it is sent as its original class and parametrized again. Locks
guard nothing across processes: the worker creates its own. Python modules replaced by an object (`torch.backends`) and
classes that their package holds under another name (`torch.nn.attention.SDPBackend`) are sent by name. Functions that
an installed package creates inside others, hooks of `transformers` for example, get the globals of that package in the
worker: copies of these would miss what the package changes there. A memoized user function is sent as the function
that it wraps, with an empty cache.
"""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_OWN = (
    "__name__",
    "__qualname__",
    "__module__",
    "__defaults__",
    "__kwdefaults__",
    "__doc__",
)  # attributes of functions
_RECORDING = "transformers.utils.output_capturing"
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def strip_hooks(module: nn.Module) -> nn.Module:
    """Return the module as a worker runs it: the same submodules, without its own hooks."""
    own = dict(vars(module))
    if not any(own.get(name) for name in _HOOKS) and "__gemini_stands_for__" not in vars(
        own.get("forward", strip_hooks)
    ):
        return module
    own |= {name: OrderedDict() for name in _HOOKS if name in own}
    own["_is_full_backward_hook"] = None
    stand_in = own.get("forward")
    if stand_in is not None and hasattr(stand_in, "__gemini_stands_for__"):
        replaced = stand_in.__gemini_stands_for__
        own.pop("forward") if replaced is None else own.update(forward=replaced)
    found: nn.Module = object.__new__(type(module))
    found.__dict__ = own
    return found


def strip_uncalled_hooks(module: nn.Module, called: Collection[str] | None, name: str = "") -> nn.Module:
    """Return a stage as a worker runs it: modules that are only traversed, never called, lose their hooks.

    Their hooks ran during capture, and their effect is part of the stage's code. `called`: names of the called modules.
    """
    if called is None or name in called:
        return module if name else strip_hooks(module)
    parts = {
        key: part if part is None else strip_uncalled_hooks(part, called, f"{name}.{key}" if name else key)
        for key, part in module._modules.items()
    }
    found = strip_hooks(module)
    if all(parts[key] is part for key, part in module._modules.items()):
        return found
    if found is module:
        found = object.__new__(type(module))
        found.__dict__ = dict(vars(module))
    found.__dict__["_modules"] = parts
    return found


def reduce_value(value: Any) -> Any:
    """Return how to pickle a value that Python cannot pickle itself; NotImplemented for all others."""
    if isinstance(value, nn.Module):
        return _reduce_module(value)
    if isinstance(value, _LOCKS):
        return (threading.Lock if isinstance(value, _LOCKS[0]) else threading.RLock), ()
    if isinstance(value, types.ModuleType) and type(value) is not types.ModuleType:
        return (importlib.import_module, (value.__name__,)) if _is_imported(value) else NotImplemented
    if isinstance(value, type) and (name := _other_name(value)):
        return _load_attribute, (value.__module__, name)
    if isinstance(value, types.FunctionType) and _is_made_inside(value):
        return _reduce_function(value)
    if isinstance(value, functools._lru_cache_wrapper):
        return reduce_memoized(value)
    return NotImplemented


def reduce_memoized(value: Any) -> Any:
    """Reduce a memoized function: by name where a worker can import it, else to the function that it wraps."""
    from gemini.user_code import is_user_module

    parameters = getattr(value, "cache_parameters", None)
    if parameters is None or not is_user_module(value.__module__):
        return value.__reduce__()
    return _make_memoized, (value.__wrapped__, *parameters().values())


def _make_memoized(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _is_made_inside(function: types.FunctionType) -> bool:
    """Return whether a module of an installed package created the function inside another one."""
    from gemini.user_code import is_user_module

    name = function.__globals__.get("__name__")
    if "<locals>" not in function.__qualname__ or not isinstance(name, str) or is_user_module(name):
        return False
    owner = sys.modules.get(name)
    return getattr(owner, "__file__", None) is not None and vars(owner) is function.__globals__


def _reduce_function(function: types.FunctionType) -> Any:
    """Reduce a function to its code and module; its state follows separately, since it may refer to itself."""
    cells = [_content(cell) for cell in function.__closure__ or ()]
    state = {name: getattr(function, name) for name in _OWN} | {"__dict__": dict(vars(function))}
    made = (function.__code__, function.__globals__["__name__"], len(cells))
    return _make_inside, made, (cells, state), None, None, _fill_function


def _content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # an empty cell
        return ()


def _make_inside(code: types.CodeType, module: str, cells: int) -> types.FunctionType:
    """Create the function of a module, without its state."""
    closure = tuple(types.CellType() for _ in range(cells))
    return types.FunctionType(code, vars(importlib.import_module(module)), code.co_name, None, closure)


def _fill_function(function: types.FunctionType, found: tuple[list[tuple[Any, ...]], dict[str, Any]]) -> None:
    """Set the state of a function."""
    cells, state = found
    for cell, content in zip(function.__closure__ or (), cells, strict=True):
        for one in content:
            cell.cell_contents = one
    vars(function).update(state.pop("__dict__"))
    for name, value in state.items():
        setattr(function, name, value)


def _other_name(cls: type) -> str:
    """Return the name under which an installed module holds a class, if that is not the class's own; else ''."""
    from gemini.user_code import is_user_module

    owner = sys.modules.get(cls.__module__)
    if owner is None or "." in cls.__qualname__ or getattr(owner, cls.__qualname__, None) is cls:
        return ""
    if is_user_module(cls.__module__):  # a worker does not run the script, and lacks its names
        return ""
    return next((name for name, found in vars(owner).items() if found is cls), "")


def _load_attribute(module: str, name: str) -> Any:
    """Return an attribute of a module."""
    return getattr(importlib.import_module(module), name)


def _is_imported(module: types.ModuleType) -> bool:
    """Return whether its name imports this very object, and its class does not define its own pickling."""
    is_plain = type(module).__reduce_ex__ is object.__reduce_ex__ and type(module).__reduce__ is object.__reduce__
    return is_plain and sys.modules.get(module.__name__) is module


def reduce_recording(value: Any) -> Any:
    """How a model of `transformers` that records what its layers return is pickled, also where Python knows how."""
    if not getattr(type(value), "_can_record_outputs", None) or _RECORDING not in sys.modules:
        return NotImplemented
    make, arguments, *state = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return _make_recording, (make, *arguments), *state


def _reduce_module(module: nn.Module) -> Any:
    found = reduce_recording(module)
    if found is not NotImplemented:
        return found
    if not parametrize.is_parametrized(module) or not type(module).__name__.startswith("Parametrized"):
        return NotImplemented
    base = type(module).__bases__[0]
    return _make_parametrized, (base, list(module.parametrizations)), dict(vars(module))


def _make_recording(make: Callable[..., nn.Module], cls: type[nn.Module], *given: Any) -> nn.Module:
    """Create a model of `transformers`, registering what models of its class can record, as their constructor does."""
    registry = getattr(importlib.import_module(_RECORDING), "_CAN_RECORD_REGISTRY", {})
    registry.setdefault(str(cls), cls._can_record_outputs)
    return make(cls, *given)


def _make_parametrized(base: type[nn.Module], names: list[str]) -> nn.Module:
    """Create a module of a class as `torch.nn.utils.parametrize` does; its state follows."""
    module: nn.Module = object.__new__(base)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module
