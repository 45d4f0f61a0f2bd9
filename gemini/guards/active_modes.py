"""Active modes: observers of single ops, which would not see the ops of a worker.

Function transforms, tracers, forward-mode derivatives and modes of the script act on every op, saved-tensor hooks on
every saved tensor, and global module hooks on every module; functions that the script puts in the place of torch's are
missing in workers. While any of these is active, everything runs in the controller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._device import DeviceContext

from gemini.guards.base import ChangeGuard
from gemini.guards.monkeypatches import find_torch_patch

_CHECKPOINT = "torch.utils.checkpoint"


def active_mode() -> str:
    """Return what is active, in words; '' if nothing is."""
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
        return "global module hooks are registered"
    if (pack := _pack_hook()) is not None and not str(getattr(pack, "__module__", "")).startswith("torch."):
        return "saved-tensor hooks are active"
    if found := find_torch_patch():
        return f"the script has replaced {found}"
    return "it is traced" if torch._C._is_tracing() else ""


class ActiveModes(ChangeGuard):
    """Modes, transforms and patches that observe or change single ops."""

    def check(self, module: nn.Module) -> str | None:  # noqa: ARG002 - modes are those of the process
        """Return what is active, or None."""
        return active_mode() or None


def is_running_backward() -> bool:
    """Return whether autograd is running: a checkpoint repeats this call."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_checkpointed() -> bool:
    """Return whether a checkpoint will repeat this call, and compare the number of saved tensors."""
    return getattr(_pack_hook(), "__module__", "") == _CHECKPOINT


def has_saved_tensor_hooks() -> bool:
    """Return whether saved-tensor hooks of the script are active."""
    pack = _pack_hook()
    return pack is not None and getattr(pack, "__module__", "") != _CHECKPOINT


def packs_saved_tensors() -> bool:
    """Return whether any saved-tensor hooks are active: an op has to run here and now for them to see it."""
    return _pack_hook() is not None


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Inside, saved-tensor hooks do not see what autograd saves: they were not there when the call was made."""
    hooks = []
    while (found := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(found)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _pack_hook() -> Any:
    """Return the active hook that packs saved tensors."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks is not None else None


def _is_harmless(mode: Any) -> bool:
    if getattr(mode, "is_ours", False):  # observes the script while calls are deferred
        return True
    return isinstance(mode, DeviceContext) and torch.device(mode.device).type == "cpu"
