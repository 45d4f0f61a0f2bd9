"""Batch errors: one error where a model fails on the batch that a command passes to it.

gemini profile: the model of model.py:make fails on its batch
  passed   float32 [2, 4]
  forward  Net.forward(self, tokens, mask=None)
  error    RuntimeError: Expected tensor for argument #1 'indices' to have …, at model.py:9, in forward: return …
    → return a batch with which model(*args, **kwargs) runs
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemini.errors import CaptureError, GeminiError

_SHOWN = 8  # values per container
_WIDTH = 60  # characters per value


@contextmanager
def report_batch_errors(target: str, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Raise one error in place of an exception inside, if the model alone raises on the batch as well."""
    try:
        yield
    except GeminiError:
        raise
    except Exception:
        fault = _run(model, args, kwargs)
        if fault is None:
            raise  # a fault of Gemini, with its traceback
        raise CaptureError(_describe_fault(target, model, args, kwargs, fault)) from None


def _run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """Return what the model raises on its batch."""
    try:
        model(*args, **kwargs)
    except Exception as fault:
        return fault
    return None


def _describe_fault(target: str, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fault: Exception) -> str:
    from gemini.runtime.exception_transfer import raising_line

    trace = "".join(traceback.format_exception(type(fault), fault, fault.__traceback__))
    text = f"{type(fault).__name__}: {str(fault).strip().splitlines()[-1] if str(fault).strip() else ''}"
    line = "" if isinstance(fault, TypeError) and _misfits(model, args, kwargs) else raising_line(trace)
    passed = [_describe(value) for value in args] + [f"{name}={_describe(value)}" for name, value in kwargs.items()]
    return (
        f"the model of {target} fails on its batch\n"
        f"  passed   {', '.join(passed) or 'nothing'}\n"
        f"  forward  {type(model).__name__}.forward{_signature(model)}\n"
        f"  error    {text}{f', at {line}' if line else ''}\n"
        "    → return a batch with which model(*args, **kwargs) runs"
    )


def _signature(model: Any) -> str:
    try:
        return str(inspect.signature(model.forward))
    except (TypeError, ValueError):
        return "(…)"


def _misfits(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether forward does not take these arguments."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return True
    except ValueError:
        return False
    return False


def _describe(value: Any) -> str:
    """Return a value in words: tensors by type and shape."""
    import torch

    if isinstance(value, torch.Tensor):
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{place}"
    more = ", …" if isinstance(value, (list, tuple, dict)) and len(value) > _SHOWN else ""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_describe(one)}" for key, one in [*value.items()][:_SHOWN]) + more + "}"
    if isinstance(value, (list, tuple)):
        begin, end = "[]" if isinstance(value, list) else "()"
        return begin + ", ".join(map(_describe, value[:_SHOWN])) + more + end
    text = repr(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"
