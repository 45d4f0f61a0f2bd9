"""Warnings of recorded ops, emitted at the line of the script that calls the op.

A recorded op runs on fake tensors first, once for each kind of call; its warnings are collected there, as they would
name a line of this package. Later calls of that kind emit the same ones. The run on contents is silent.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from gemini.quiet_warnings import keep_warning_registry
from gemini.runtime.pool.worker_output import replay_output
from gemini.runtime.protocol import Warned

_PACKAGE_FOLDER = str(Path(__file__).parents[2])
_INTERNAL_MODULES = ("gemini.", "torch.overrides")  # modules between the script's call and this one


def collect_warnings(run: Callable[[], Any], found: list[warnings.WarningMessage]) -> Any:
    """Return what `run` returns; its warnings are appended to `found`."""
    with keep_warning_registry(), warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        made = run()
    found += given
    return made


def emit_at_caller(function: Any, found: list[warnings.WarningMessage]) -> None:
    """Emit warnings of a function at the script's call of it."""
    for one in found:
        if one.filename.startswith(_PACKAGE_FOLDER):
            _warn_at(_find_caller(function), one)
        else:
            replay_output(Warned(one.category, str(one.message), one.filename, one.lineno))


def _find_caller(function: Any) -> FrameType:
    """Return the frame that has called the function, outside this package and the function itself."""
    code = getattr(function, "__code__", None)
    frame = here = sys._getframe(1)
    while str(frame.f_globals.get("__name__")).startswith(_INTERNAL_MODULES) or frame.f_code is code:
        if frame.f_back is None:
            return here
        frame = frame.f_back
    return frame


def _warn_at(frame: FrameType, one: warnings.WarningMessage) -> None:
    known = frame.f_globals
    warnings.warn_explicit(
        one.message, one.category, frame.f_code.co_filename, frame.f_lineno,
        known.get("__name__"), known.setdefault("__warningregistry__", {}),
    )  # fmt: skip
