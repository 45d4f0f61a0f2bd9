"""Modules whose `forward` a script calls itself: `net.forward(x)`, as many do.

Where no hook hangs on the module, that is what a call of it does. So it becomes one in a process whose models are
looked for: calls are where they are met.
"""

from __future__ import annotations

import sys
from typing import Any

from gemini.launcher.script_api.script_devices import torch_module

_OTHERWISE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl")


class _Called:
    """A module, whose `forward` is a call of it. No method of ours: it would be a frame in the script's tracebacks."""

    __slots__ = ("forward",)

    def __init__(self, forward: Any) -> None:
        self.forward = forward


def called(value: Any) -> Any:
    """`value`, whose `forward` is about to be called."""
    return value


def begin() -> None:
    """From now on they are calls: what instrumented source finds as `__gemini__.called`, at every call anew."""
    namespace: Any = sys.modules["gemini.launcher.script_api"]
    namespace.called = _called


def end() -> None:
    """As it was."""
    namespace: Any = sys.modules["gemini.launcher.script_api"]
    namespace.called = called


def _called(value: Any) -> Any:
    torch = torch_module()
    if torch is None or not isinstance(value, torch.nn.Module) or not _is_a_call(value, torch):
        return value
    return _Called(value.__call__)


def _is_a_call(module: Any, torch: Any) -> bool:
    """Whether calling a module is to call its `forward`, and nothing else."""
    if torch.compiler.is_compiling() or type(module).__call__ is not torch.nn.Module.__call__:
        return False
    if torch._C._get_tracing_state() is not None:  # names of modules go into the trace
        return False
    state = vars(module)
    if any(state.get(name) for name in _OTHERWISE):
        return False
    return not torch.nn.modules.module._has_any_global_hook()
