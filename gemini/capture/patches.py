"""Patches: the functions that are intercepted while a model is traced.

    nn.Module.__call__            which module runs, and whether it is opened or opaque
    nn.Module.__setattr__         attributes that the glue writes, also with an equal value
    nn.Module.__getattribute__    attributes that the glue reads, and so may branch on
    torch function mode           every torch function called between modules (in the tracer)
    autograd.Function.apply       custom functions: one opaque node, which keeps their backward
    ScriptFunction.__call__       scripted functions, which have no Python frame
    builtins.len, range           which would turn traced sizes into plain numbers without a guard
    torch.utils.checkpoint        checkpointed calls: opaque, and recomputed in later runs too
    torch.distributions           validation of parameters, which would branch on them, is off
    nn.Parameter.__new__          constants wrapped in a parameter without a gradient: not a torch function

The patches last for a `with` block and act in the tracing thread only. Opaque functions are patched in the globals of
their module or in their class.
"""

from __future__ import annotations

import builtins
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch.distributions import Distribution

from gemini.ir.op_targets import find_call
from gemini.ir.symint import TracedInt

# One thread at a time patches how modules are called, or traces a call: each patch restores what it found, so two
# threads that interleave would restore each other's patches.
PATCH_LOCK = threading.RLock()


def _renew_lock() -> None:
    """Release the lock in a forked process: its only thread does not hold it."""
    reset = getattr(PATCH_LOCK, "_at_fork_reinit", None)
    if reset is not None:
        reset()


os.register_at_fork(after_in_child=_renew_lock)

ORIGINAL_CALL = nn.Module.__call__
ORIGINAL_SET = nn.Module.__setattr__
ORIGINAL_LEN = len
_MACHINERY = frozenset(dir(nn.Module()))  # attributes of every module
ORIGINAL_RANGE = range
ORIGINAL_SCRIPT = torch.jit.ScriptFunction.__call__
ORIGINAL_PARAMETER = nn.Parameter.__new__
_GENERATOR = "_checkpoint_without_reentrant_generator"  # runs a checkpoint; from torch 2.15 on by another function
_CHECKPOINT = f"{_GENERATOR}_impl" if hasattr(checkpointing, f"{_GENERATOR}_impl") else _GENERATOR
_APPLY = torch.autograd.Function.__dict__["apply"]  # a class method in Python, in C from torch 2.14 on


def original_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Apply a custom autograd function by the method of torch."""
    return _APPLY.__get__(None, cls)(*args, **kwargs)


class TraceHandler(Protocol):
    """Handles the intercepted calls."""

    def on_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module is called."""

    def on_set(self, module: nn.Module, name: str, value: Any) -> None:
        """An attribute of a module was set."""

    def on_get(self, module: nn.Module, name: str) -> None:
        """An attribute of a module was read."""

    def on_frozen_parameter(self, data: torch.Tensor) -> torch.Tensor:
        """The glue makes a parameter without a gradient of a tensor."""

    def on_function(self, cls: type, args: Any, kwargs: Any) -> Any:
        """A custom autograd function is applied."""

    def on_call(self, target: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """An opaque Python function is called."""

    def on_checkpoint(self, kind: str) -> Any:
        """Return a context manager for code inside a checkpoint."""


class _RangeType(type):
    """`isinstance(value, range)` keeps its meaning."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, ORIGINAL_RANGE)


class TracedRange(metaclass=_RangeType):
    """Replaces `range`, which reads traced numbers without a guard: a loop bound must be guarded."""

    def __new__(cls, *bounds: Any) -> Any:
        """Return a real range; traced bounds record a guard."""
        return ORIGINAL_RANGE(*(int(bound) if isinstance(bound, TracedInt) else bound for bound in bounds))


@contextmanager
def intercept(handler: TraceHandler, calls: tuple[str, ...] = ()) -> Iterator[None]:
    """Route the intercepted calls to `handler` until the block ends."""
    thread = threading.get_ident()
    module_patches, torch_patches = _make_module_patches(handler, thread), _make_torch_patches(handler, thread)
    with PATCH_LOCK, ExitStack() as stack:
        stack.callback(_register_builtins)
        _patch(stack, builtins, "len", _make_length(thread))
        _patch(stack, builtins, "range", TracedRange)
        _patch(stack, nn.Module, "__call__", module_patches.call)
        _patch(stack, nn.Module, "__setattr__", module_patches.set)
        nn.Module.__getattribute__ = module_patches.get
        stack.callback(delattr, nn.Module, "__getattribute__")
        _patch(stack, nn.Parameter, "__new__", staticmethod(torch_patches.parameter))
        _patch(stack, torch.autograd.Function, "apply", classmethod(torch_patches.apply))
        _patch(stack, checkpointing, "CheckpointFunction", torch_patches.reentrant)
        _patch(stack, checkpointing, _CHECKPOINT, torch_patches.saved)
        _patch(stack, torch.jit.ScriptFunction, "__call__", torch_patches.script)
        _patch(stack, Distribution, "_validate_args", False)
        for target in calls:
            _wrap_call(stack, handler, target)
        yield


class _ModulePatches(NamedTuple):
    """Replacements for methods of `nn.Module`."""

    call: Any
    set: Any
    get: Any


def _make_module_patches(handler: TraceHandler, thread: int) -> _ModulePatches:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return ORIGINAL_CALL(module, *args, **kwargs)
        return handler.on_module(module, args, kwargs)

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        ORIGINAL_SET(module, name, value)
        if threading.get_ident() == thread:
            handler.on_set(module, name, value)

    def get_attribute(module: nn.Module, name: str) -> Any:
        if name not in _MACHINERY and threading.get_ident() == thread:
            handler.on_get(module, name)  # also a missing attribute: its absence may decide a branch
        return object.__getattribute__(module, name)

    return _ModulePatches(call, set_attribute, get_attribute)


class _TorchPatches(NamedTuple):
    """Replacements for Python functions of torch."""

    parameter: Any
    apply: Any
    script: Any
    reentrant: Any
    saved: Any


def _make_torch_patches(handler: TraceHandler, thread: int) -> _TorchPatches:
    def parameter(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        frozen = cls is nn.Parameter and type(data) in (torch.Tensor, nn.Parameter) and requires_grad is False
        # Parameters that torch makes, where it casts or moves a module, are no results of the glue.
        by_torch = frozen and str(sys._getframe(1).f_globals.get("__name__", "")).startswith("torch.")
        if not frozen or by_torch or threading.get_ident() != thread:
            return ORIGINAL_PARAMETER(cls, data, requires_grad)
        return handler.on_frozen_parameter(data)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original_apply(cls, *args, **kwargs)
        return handler.on_function(cls, args, kwargs)

    def script(function: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return ORIGINAL_SCRIPT(function, *args, **kwargs)
        target = _script_target(function)
        return handler.on_call(target, functools.partial(ORIGINAL_SCRIPT, function), args, kwargs)

    class Reentrant:
        """Replaces torch's CheckpointFunction."""

        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            with handler.on_checkpoint("reentrant"):
                return function(*args)

    def saved(*_: Any, **__: Any) -> Iterator[None]:
        with handler.on_checkpoint("saved"):
            yield

    return _TorchPatches(parameter, apply, script, Reentrant, saved)


def _make_length(thread: int) -> Callable[[Any], int]:
    def length(value: Any) -> int:
        # The built-in returns a plain number; the length of a tensor must stay traced.
        if isinstance(value, torch.Tensor) and threading.get_ident() == thread:
            return value.shape[0] if value.dim() else ORIGINAL_LEN(value)
        return ORIGINAL_LEN(value)

    return length


def _patch(stack: ExitStack, owner: Any, name: str, replacement: Any) -> None:
    original = vars(owner)[name]
    setattr(owner, name, replacement)
    stack.callback(setattr, owner, name, original)


def _register_builtins() -> None:
    """Add `len` and `range` to the builtins of `torch.compile`, if it was loaded while they were patched."""
    known: Any = getattr(sys.modules.get("torch._dynamo.trace_rules"), "_builtin_function_ids", None)
    if getattr(known, "function_ids", None) is not None:
        for one in (one for one in (len, range) if id(one) not in known.function_ids):
            known.add(id(one))
            known.function_names[id(one)] = f"builtins.{one.__name__}"


def _script_target(function: Any) -> str:
    """Return `package.module:name` of a scripted function; its qualified name begins with `__torch__`."""
    module, _, name = str(function.qualified_name).removeprefix("__torch__.").rpartition(".")
    return f"{module}:{name}"


def _wrap_call(stack: ExitStack, handler: TraceHandler, target: str) -> None:
    owner, name = find_call(target)
    original = owner.__dict__[name]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return handler.on_call(target, original, args, kwargs)

    _patch(stack, owner, name, wrapper)
