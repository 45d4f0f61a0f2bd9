"""Hooks on parameters that draw random numbers: each gets the numbers of its turn, and the turns are torch's.

    for p in model.parameters():
        p.register_hook(lambda gradient: gradient + 0.01 * torch.randn_like(gradient))

Gradients of a step in workers arrive all at once, in an order that is not that of autograd's own graph. That matters to
hooks which draw, so models with such hooks on several parameters run in the program's process. They are known by the
names in their code, and in the functions of the program that it names.
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
from gemini.guards.base import Guard
from gemini.guards.bytecode import globals_in, names_in, part_of
from gemini.guards.value_watch import cells
from gemini.user_code import is_user_module


class ParameterHooks(Guard):
    """Those of one model; looked at when torch has given a hook anywhere a number."""

    def __init__(self) -> None:
        self._given, self._found = -1, ""

    def check(self, module: nn.Module) -> str | None:
        """Why a model has to run in the program's process; '' where it need not."""
        if self._given != RemovableHandle.next_id:
            self._given = RemovableHandle.next_id
            hooked = [found for one in module.parameters() if one.requires_grad and (found := [*_hooks_of(one)])]
            draws = len(hooked) > 1 and any(_draws(hook) for hooks in hooked for hook in hooks)
            self._found = "hooks on its parameters draw random numbers, one after the other" if draws else ""
        return self._found or None


def _hooks_of(parameter: torch.Tensor) -> Iterator[Any]:
    for table in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        yield from (table or {}).values()


def _draws(hook: Any, depth: int = 0) -> bool:
    """Whether code names something that draws; what it calls of the program's is looked at, too."""
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
