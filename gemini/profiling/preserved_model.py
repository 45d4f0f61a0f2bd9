"""Preserved model: profiling runs the model many times and restores its state.

Restored on exit, also after an error: buffers (BatchNorm statistics), plain attributes of modules, `.grad` of all
parameters, and the random generators of torch, Python and NumPy. Parameters are only copied for modules found to write
them. User hooks on parameters are disabled meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gemini.capture.module_hooks import without_tensor_hooks
from gemini.snapshot.model_state import AttributeSnapshot
from gemini.snapshot.rng_snapshot import GeneratorStates


class PreservedModel:
    """A context that restores the state of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> PreservedModel:
        self.attributes, self.generators = AttributeSnapshot(self.model), GeneratorStates()
        self.buffers = [(t, t.detach().clone()) for t in self.model.buffers() if not t.is_meta]
        self.gradients = [(p, p.grad) for p in self.model.parameters()]
        self.parameters: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for parameter, _ in self.gradients:
            parameter.grad = None
        self.hooks = without_tensor_hooks(self.model.parameters())
        self.hooks.__enter__()
        return self

    def copy_parameters(self, tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """Return copies of the parameters among some tensors, with their versions, for `check_written`."""
        return [
            (t, t.detach().clone(), t._version)
            for t in tensors
            if isinstance(t, nn.Parameter) and not t.is_meta and id(t) not in self.parameters
        ]

    def check_written(self, copies: list[tuple[torch.Tensor, torch.Tensor, int]]) -> bool:
        """Return whether parameters were written since `copy_parameters`; those are restored on exit."""
        written = [entry for entry in copies if entry[0]._version != entry[2]]
        self.restore_later(written)
        return bool(written)

    def restore_later(self, copies: list[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
        """Restore these parameters on exit."""
        self.parameters.update((id(tensor), (tensor, copy)) for tensor, copy, _ in copies)

    def __exit__(self, *_: Any) -> None:
        self.hooks.__exit__(None, None, None)
        self.attributes.restore()
        with torch.no_grad():
            for tensor, saved in (*self.buffers, *self.parameters.values()):
                tensor.data.copy_(saved)
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        self.generators.restore()
