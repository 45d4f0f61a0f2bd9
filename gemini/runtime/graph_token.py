"""Graph token: a tensor that autograd saves for backward, and whose release reports that the graph was freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gemini.runtime.devices.finalizers import call_when_freed


def make_token(number: int, *acts: Callable[[], Any]) -> torch.Tensor:
    """Return a tensor that holds `number` and calls `acts` when it is freed; they should be implemented in C."""
    memory = memoryview(bytearray(number.to_bytes(8, "little")))
    call_when_freed(memory, *acts)
    return torch.frombuffer(memory, dtype=torch.int64)
