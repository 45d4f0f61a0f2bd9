"""Hazard mode: detects ops of the script that must run after calls that are waiting.

A TorchFunctionMode sees every torch function that the script calls. Before one that

    draws random numbers                    waiting calls that draw run first
    writes a parameter or a buffer          waiting calls of that model run with its present contents
    reads a buffer that a call writes       that call runs first

It lies below all modes of the script, so that the script can enter and leave its own, and is active only while calls
wait.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gemini.random_numbers.random_ops import TRAINING_ARGUMENT, may_draw
from gemini.runtime.call_outcome import FallbackReason
from gemini.runtime.deferred import pending_queue
from gemini.runtime.deferred.call_context import storage_id

DRAWS, WRITES = 1, 2
_T: Any = torch.Tensor
_kinds: dict[Any, int] = {_T.requires_grad_: WRITES, _T.requires_grad.__set__: WRITES, _T.data.__set__: WRITES}
_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
             "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__idiv__")  # fmt: skip


class HazardMode(TorchFunctionMode):  # type: ignore[misc]
    """Runs waiting calls before ops that conflict with them."""

    is_ours = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not pending_queue.is_busy():
            kind = _kinds.get(func)
            if kind is None:
                kind = _kinds[func] = _kind(func)
            if kind & DRAWS and _does_draw(func, args, kwargs):
                run_random_calls()
            if kind & WRITES or "out" in kwargs:
                _before_writing(args, kwargs)
            _before_reading(args, kwargs)
        _mode.depth += 1
        try:
            return func(*args, **kwargs)
        finally:
            _mode.depth -= 1


class _ModeDepth(threading.local):
    depth = 0  # torch has popped the mode to call it, and pushes it back afterwards


_mode = _ModeDepth()
_hazard_mode = HazardMode()


def toggle_hazard_mode(begin: bool) -> None:
    """Enter or leave the mode in this thread."""
    if _mode.depth:
        return
    count = torch._C._len_torch_function_stack()
    if not begin and not count:
        return
    at = [torch._C._get_function_stack_at(index) is _hazard_mode for index in range(count)]
    if any(at) == begin:
        return
    # Modes of the script stay above this one: it must pop its own when it leaves them.
    modes = [torch._C._pop_torch_function_stack() for _ in range(count)][::-1]
    for mode in [_hazard_mode, *modes] if begin else [mode for mode in modes if mode is not _hazard_mode]:
        torch._C._push_on_torch_function_stack(mode)


def run_random_calls() -> None:
    """Run waiting calls that draw: random numbers are drawn, or the generator is read."""
    if not pending_queue.is_busy():
        for one in pending_queue.waiting_calls():
            if one.runner.draws:
                one.complete(FallbackReason.DRAWN_EARLY)


def _before_writing(args: Any, kwargs: Any) -> None:
    calls = pending_queue.waiting_calls()
    if not calls:
        return
    written = {storage_id(one) for one in _tensors((args, kwargs))}
    for one in calls:
        if written & one.protected_storages():
            one.compute_before_update()


def _before_reading(args: Any, kwargs: Any) -> None:
    calls = [one for one in pending_queue.waiting_calls() if one.runner.writes]
    if not calls:
        return
    read = {storage_id(one) for one in _tensors((args, kwargs))}
    for one in calls:
        if any(storage_id(buffer) in read for buffer in one.runner.model.buffers()):
            one.complete(FallbackReason.BUFFERS_READ)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(value)
        if any(type(value) is kind for kind in _PLAIN) and value.layout is torch.strided and not is_wrapped:
            yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _kind(func: Any) -> int:
    name = getattr(func, "__name__", "")
    writes = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return (DRAWS if may_draw(name) else 0) | (WRITES if writes else 0)


def _does_draw(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call draws, as far as its arguments tell."""
    name = func.__name__
    at = TRAINING_ARGUMENT.get(name)
    if at is not None:
        return bool(kwargs.get("training", args[at] if len(args) > at else True))
    if name == "multi_head_attention_forward":
        return bool(kwargs.get("training", True))
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return True
