"""Parameter hooks that draw random numbers: each gets its numbers in turn, in the order of autograd.

    for p in model.parameters():
        p.register_hook(lambda gradient: gradient + 0.01 * torch.randn_like(gradient))

Gradients of a step in workers arrive together, in another order than in autograd's graph. Models with hooks on several
parameters that draw random numbers therefore run in the controller. Such hooks are recognized by the names in their
code, and in the user functions that it names.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gemini.capture.rng_use import names_rng
from gemini.guards.base import ChangeGuard
from gemini.purity.bytecode import globals_in, names_in, part_of
from gemini.purity.value_watch import cells
from gemini.user_code import is_user_module


class ParameterHooks(ChangeGuard):
    """The parameter hooks of one model; inspected when torch has registered a hook anywhere."""

    def __init__(self) -> None:
        self._last_hook_id, self._found = -1, ""

    def check(self, module: nn.Module) -> str | None:
        """Return why the model has to run in the controller, or None."""
        if self._last_hook_id != RemovableHandle.next_id:
            self._last_hook_id = RemovableHandle.next_id
            hooked = [found for one in module.parameters() if one.requires_grad and (found := [*_hooks_of(one)])]
            draws = len(hooked) > 1 and any(_draws(hook) for hooks in hooked for hook in hooks)
            self._found = "hooks on several of its parameters draw random numbers" if draws else ""
        return self._found or None


def _hooks_of(parameter: torch.Tensor) -> Iterator[Any]:
    for table in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        yield from (table or {}).values()


def _draws(hook: Any, depth: int = 0) -> bool:
    """Return whether code names something that draws random numbers; user functions that it calls are followed."""
    if isinstance(hook, functools.partial):
        hook = hook.func
    function = part_of(hook, "__func__") or hook
    if not isinstance(function, types.FunctionType):
        function = part_of(type(hook), "__call__")
    if not isinstance(function, types.FunctionType) or not is_user_module(function.__module__):
        return False
    code = function.__code__
    if names_rng(names_in(code)):
        return True
    named = [function.__globals__.get(name) for name in globals_in(code)]
    return depth < 3 and any(_draws(one, depth + 1) for one in (*named, *cells(function).values()) if callable(one))
