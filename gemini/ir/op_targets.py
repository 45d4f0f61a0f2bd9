"""Op targets: the names of the functions that nodes call, and the functions of these names.

An op is recorded by the public name under which torch offers it (`torch.Tensor.add`, `torch.Tensor.T.__get__`,
`torch.nn.functional.linear`), so that a graph is plain data. A name is used only if it resolves to the same function.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import resolve_name

from gemini.errors import CaptureError
from gemini.ir.import_paths import symbol_of
from gemini.quiet_warnings import keep_warning_registry


@functools.lru_cache(maxsize=4096)
def op_name(func: Callable[..., Any]) -> str:
    """Return the name of a torch function; '' if no name resolves to it."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{func!s}"
    with keep_warning_registry():
        candidates: list[str] = [str(resolve_name(func))]
    owner = getattr(func, "__self__", None)
    if hasattr(owner, "__objclass__"):  # a property of Tensor: the getter or setter of a descriptor
        candidates.append(f"torch.Tensor.{getattr(owner, '__name__', '')}.{func.__name__}")
    symbol = symbol_of(func)
    if symbol is not None:
        candidates.append(f"{symbol.module}.{symbol.qualname}")
    name = getattr(func, "__name__", "")
    candidates += [f"torch.Tensor.{name}", f"torch.{name}", f"torch.nn.functional.{name}", f"torch._C._nn.{name}"]
    for candidate in candidates:
        try:
            if candidate and find_op(candidate) == func:
                return candidate
        except (CaptureError, AttributeError, ValueError):
            continue
    return ""


@functools.lru_cache(maxsize=4096)
def find_op(name: str) -> Callable[..., Any]:
    """Return the function of a name made by `op_name`."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except (ImportError, ValueError):
            continue
        try:
            for part in parts[count:]:
                found = getattr(found, part)
        except (AttributeError, RuntimeError):
            break
        return found  # type: ignore[no-any-return]
    raise CaptureError(f"the op {name!r} does not exist in torch {torch.__version__}")


def find_call(target: str) -> tuple[Any, str]:
    """Return (module or class, attribute) of a target `package.module:Class.name`."""
    module, _, qualname = target.partition(":")
    owner: Any = sys.modules[module]
    *outer, name = qualname.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name
