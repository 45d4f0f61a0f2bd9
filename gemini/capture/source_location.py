"""Source location: the running line of the model's code, and the functions around it that could become opaque."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

_CAPTURE = os.path.dirname(__file__)
_PACKAGE = os.path.join(os.path.dirname(_CAPTURE), "")
_TRACERS = (
    _CAPTURE,
    os.path.join(_PACKAGE, "ir", ""),
    os.path.join(_PACKAGE, "snapshot", ""),
    os.path.join(_PACKAGE, "batch_analysis", "expert_loops.py"),
)
_SKIP = (os.path.dirname(torch.__file__), *_TRACERS, os.path.dirname(os.__file__) + "/contextlib.py", "<")


def is_model_code(frame: FrameType) -> bool:
    """Return whether a frame belongs to the model's code."""
    return not frame.f_code.co_filename.startswith(_SKIP)


def source_line() -> str:
    """Return `file.py:12` of the innermost frame outside torch and the tracer; '' if it is Gemini's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_model_code(frame):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_PACKAGE):
        return ""
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


def _short(filename: str) -> str:
    """Return the last two parts of a path: enough to find the file, the same on every machine."""
    return "/".join(filename.split(os.sep)[-2:])


def call_candidates(
    module: nn.Module,
    accepts: Callable[[FrameType], bool] = lambda frame: True,  # noqa: ARG005
) -> tuple[str, ...]:
    """Return the running functions below `module.forward`, innermost first, as `package.mod:name`.

    Only functions that can be intercepted by name count: globals of the calling module, methods of a class.
    """
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_model_code(frame):
            frames.append(frame)
        if frame.f_code.co_name == "forward" and frame.f_locals.get("self") is module:
            break
        frame = frame.f_back
    if frame is None:
        return ()
    found = (_find(caller, frames[: index + 1]) for index, caller in enumerate(frames[1:]) if accepts(frames[index]))
    return tuple(dict.fromkeys(target for target in found if target))


def name_of_call(callee: FrameType) -> str:
    """Return the name under which the function of a frame can be intercepted; '' if there is none."""
    caller = callee.f_back
    while caller is not None and not is_model_code(caller):
        caller = caller.f_back
    return "" if caller is None else _find(caller, [callee])


def _find(caller: FrameType, inner: list[FrameType]) -> str:
    """Return the name by which `caller` reaches the function of the outermost frame of `inner`."""
    callee = inner[-1]
    if callee.f_code.co_name.startswith("<"):
        return ""
    owners = [(caller.f_globals, str(caller.f_globals.get("__name__", "")))]
    if "self" in callee.f_locals:
        owners = _classes(callee.f_locals["self"])
    for owner, target in owners:
        for name, function in list(owner.items()):
            if getattr(function, "__code__", None) is not callee.f_code or name.startswith("__"):
                continue
            wrapped = getattr(function, "__wrapped__", None)
            if wrapped is not None and not any(frame.f_code is _code(wrapped) for frame in inner[:-1]):
                continue  # another function behind the same decorator
            return f"{target}{'.' if ':' in target else ':'}{name}"
    return ""


def _code(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return getattr(function, "__code__", None)


def _classes(instance: Any) -> list[tuple[dict[str, Any], str]]:
    """Return the namespaces of an object's classes, without torch's and local ones."""
    return [
        (dict(vars(cls)), f"{cls.__module__}:{cls.__qualname__}")
        for cls in type(instance).__mro__
        if not cls.__module__.startswith(("torch.", "builtins")) and "<" not in cls.__qualname__
    ]
