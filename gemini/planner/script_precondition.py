"""Scripted modules: compiled by `torch.jit`, they cannot be sent to a worker, so what holds one has no plan."""

from __future__ import annotations

import torch
from torch import nn

from gemini.planner.step_plan import UnplannableError


def check_scripted(model: nn.Module) -> None:
    """Raises UnplannableError where a module inside is one."""
    name = next((name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)), None)
    if name is not None:
        raise UnplannableError(f"{name or 'it'} is compiled by torch.jit, and cannot be sent to a worker")
