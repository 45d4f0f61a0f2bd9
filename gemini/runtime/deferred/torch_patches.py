"""Patches of torch for paths that bypass `__torch_function__`, each installed once.

Function.apply            a custom function is recorded as one opaque op
compiled functions        get real tensors: the compiler reads memory
scripted functions        likewise: they run below `__torch_function__`
function transforms       likewise (vmap, grad, jvp): tensors are real before they are wrapped
generator state           reading or setting it must find the state of a run in one process
optimizer.step            values that depend on parameters are computed before they change
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gemini.errors import GeminiError
from gemini.runtime.deferred import deferred_backward, pending_queue
from gemini.runtime.deferred.deferred_tensor import DeferredTensor, find_deferred
from gemini.runtime.deferred.hazard_mode import run_random_calls, toggle_hazard_mode

_apply: Any = torch.autograd.Function.__dict__["apply"]  # a class method in Python, in C from torch 2.14 on
_SEEDING = ("manual_seed", "seed", "get_rng_state", "set_rng_state")
_SEEDING_CUDA = ("manual_seed", "manual_seed_all", "seed", "seed_all", "get_rng_state", "get_rng_state_all",
                 "set_rng_state", "set_rng_state_all")  # fmt: skip
_installed: set[str] = set()


def install_patches() -> None:
    """Install all patches; called again for modules that were imported since."""
    if "ours" not in _installed:
        _installed.add("ours")
        deferred_backward.install()
        pending_queue.listeners.append(toggle_hazard_mode)
        torch.autograd.Function.apply = classmethod(_apply_recorded)
        register_optimizer_step_pre_hook(_before_step)
        for module, names in ((torch, _SEEDING), (torch.random, _SEEDING), (torch.cuda, _SEEDING_CUDA),
                              (torch.cuda.random, _SEEDING_CUDA)):  # fmt: skip
            for name in names:
                setattr(module, name, _after_calls(getattr(module, name)))
        for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
            kind.__call__ = _before_scripted(kind.__call__)
        for module, name in ((vmap, "vmap_increment_nesting"), (eager_transforms, "grad_increment_nesting"),
                             (eager_transforms, "jvp_increment_nesting")):  # fmt: skip
            if hasattr(module, name):
                setattr(module, name, _before_transform(getattr(module, name)))
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None and "compiler" not in _installed and hasattr(frames, "_callback_from_stance"):
        _installed.add("compiler")
        frames._callback_from_stance = _before_compiled(frames._callback_from_stance)


@dataclass(frozen=True)
class AppliedFunction:
    """A custom autograd function as an op of a tape."""

    cls: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it."""
        return self.cls.apply(*args, **kwargs)

    @property
    def __name__(self) -> str:
        """The name of the function."""
        return f"{self.cls.__name__}.apply"


def _apply_recorded(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(one, DeferredTensor) for one in args) or any(True for _ in find_deferred((args, kwargs))):
        return DeferredTensor.__torch_function__(AppliedFunction(cls), (DeferredTensor,), args, kwargs)
    return _apply.__get__(None, cls)(*args, **kwargs)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Compute dependent values before a step; a closure changes parameters each time it is called."""
    _compute_before_update(optimizer)
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(given):
        return None

    def closure(*inner: Any, **named: Any) -> Any:
        result = given(*inner, **named)
        _compute_before_update(optimizer)
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def _compute_before_update(optimizer: torch.optim.Optimizer) -> None:
    calls = [*pending_queue.waiting_calls(), *pending_queue.completed_calls()]
    if not calls:
        return
    changing = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for one in calls:
        if one.depends_on(changing):
            one.compute_before_update()


def _after_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def after(*args: Any, **kwargs: Any) -> Any:
        run_random_calls()
        return function(*args, **kwargs)

    return after


def _before_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def before(callback: Any) -> Any:
        if callable(callback):  # else the compiler is disabled
            _materialize_all()
        return function(callback)

    return before


def _before_scripted(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def before(function: Any, *args: Any, **kwargs: Any) -> Any:
        if any(True for _ in find_deferred((args, kwargs))):
            _materialize_all()
        return call(function, *args, **kwargs)

    return before


def _before_transform(enter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(enter)
    def before(*args: Any, **kwargs: Any) -> Any:
        _materialize_all()
        return enter(*args, **kwargs)

    return before


def _materialize_all() -> None:
    """Make all deferred tensors of the script ordinary ones."""
    for one in [] if pending_queue.is_busy() else [*pending_queue.waiting_calls(), *pending_queue.completed_calls()]:
        with suppress(GeminiError):  # the failed values may be unused: reading one raises
            one.materialize_all()
