"""Call obstacles: properties of a call, beside its kind, that keep it from running in stages or from being deferred."""

from __future__ import annotations

import torch
from torch import nn

from gemini.guards.active_modes import has_saved_tensor_hooks, is_checkpointed
from gemini.guards.model_version import ModelContents
from gemini.runtime.call_outcome import FallbackReason


def find_unsendable(tensors: list[torch.Tensor]) -> str:
    """Return why steps with these inputs cannot run in stages; '' where they can."""
    for one in tensors:
        if type(one) not in (torch.Tensor, nn.Parameter):
            return f"an argument is a tensor of class {type(one).__name__}"
        if one.is_nested or one.is_quantized or one.layout not in (torch.strided, torch.sparse_coo):
            return f"an argument is a {'nested' if one.is_nested else 'quantized or compressed sparse'} tensor"
    return ""


def find_obstacle(contents: ModelContents) -> str:
    """Return why a call must run at once and as the script wrote it; '' where it may be deferred."""
    if contents.has_swapped():
        return FallbackReason.SWAPPED_PARAMETERS
    if is_checkpointed():
        return FallbackReason.CHECKPOINTED
    return FallbackReason.SAVED_TENSOR_HOOKS if has_saved_tensor_hooks() else ""
