"""Direct calls of `forward`: `net.forward(x)` in a script.

For a module without hooks it is equivalent to a call of the module. In a process with model discovery it becomes that
call, as discovery intercepts calls.
"""

from __future__ import annotations

import sys
from typing import Any

from gemini.launcher.script_api.script_devices import torch_module

_CALL_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_compiled_call_impl")


class _ModuleCall:
    """An object whose `forward` is the call of a module; an attribute, as a method would add a frame to tracebacks."""

    __slots__ = ("forward",)

    def __init__(self, forward: Any) -> None:
        self.forward = forward


def called(value: Any) -> Any:
    """Return `value`, whose `forward` the script calls next."""
    return value


def enable_module_calls() -> None:
    """Turn calls of `forward` into calls of the module: replace `__gemini__.called`."""
    namespace: Any = sys.modules["gemini.launcher.script_api"]
    namespace.called = _module_call


def disable_module_calls() -> None:
    """Restore `__gemini__.called`."""
    namespace: Any = sys.modules["gemini.launcher.script_api"]
    namespace.called = called


def _module_call(value: Any) -> Any:
    torch = torch_module()
    if torch is None or not isinstance(value, torch.nn.Module) or not _is_a_call(value, torch):
        return value
    return _ModuleCall(value.__call__)


def _is_a_call(module: Any, torch: Any) -> bool:
    """Return whether a call of the module does nothing but call its `forward`."""
    if torch.compiler.is_compiling() or type(module).__call__ is not torch.nn.Module.__call__:
        return False
    if torch._C._get_tracing_state() is not None:  # a trace records the names of modules
        return False
    state = vars(module)
    if any(state.get(name) for name in _CALL_HOOKS):
        return False
    return not torch.nn.modules.module._has_any_global_hook()
