"""Watchers: what else follows the ops of a call, and would not see those of a worker.

Function transforms, tracers, forward-mode derivatives and the program's own modes work on every single op, hooks on
what autograd saves on every tensor, and hooks of all modules on every single module; functions that the program puts in
the place of torch's are not those of workers. While any of that is so, everything runs in this process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._device import DeviceContext

from gemini.guards.base import Guard
from gemini.guards.monkeypatches import find_torch_patch

_CHECKPOINT = "torch.utils.checkpoint"


def active_mode() -> str:
    """Who watches, in words; '' if nobody does."""
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms it"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives are taken"
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode is active"
    count = torch._C._len_torch_function_stack()
    if count and not all(_is_harmless(torch._C._get_function_stack_at(at)) for at in range(count)):
        return "a TorchFunctionMode is active"
    if _has_any_global_hook():
        return "hooks hang on all modules"
    if (pack := _saving()) is not None and not str(getattr(pack, "__module__", "")).startswith("torch."):
        return "hooks take the tensors that are saved for backward"
    if found := find_torch_patch():
        return f"the program has replaced {found}"
    return "it is traced" if torch._C._is_tracing() else ""


class ActiveModes(Guard):
    """Modes, transforms and patches that see or change single ops."""

    def check(self, module: nn.Module) -> str | None:  # noqa: ARG002 - modes are those of the process
        """Return what is active, or None."""
        return active_mode() or None


def is_running_backward() -> bool:
    """Whether autograd is running: what is called now is called again, by a checkpoint."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_checkpointed() -> bool:
    """Whether a checkpoint will run again what is called now, and compare the number of tensors saved."""
    return getattr(_saving(), "__module__", "") == _CHECKPOINT


def has_saved_tensor_hooks() -> bool:
    """Whether the program's own hooks take the tensors that autograd saves."""
    pack = _saving()
    return pack is not None and getattr(pack, "__module__", "") != _CHECKPOINT


def _saving() -> Any:
    """The hook that takes saved tensors now."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks is not None else None


def _is_harmless(mode: Any) -> bool:
    if getattr(mode, "is_ours", False):  # looks at what the program does while calls are put off
        return True
    return isinstance(mode, DeviceContext) and torch.device(mode.device).type == "cpu"
