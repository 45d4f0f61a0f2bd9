"""Unchanged: profiling runs the model many times and leaves no trace.

Put back at the end, also after an error: buffers (BatchNorm statistics), plain attributes of modules, `.grad` of all
parameters, and the generators of torch, Python and NumPy. Parameters are only copied for modules found to write them.
Hooks of the program on parameters are not called meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gemini.capture.module_hooks import unhooked
from gemini.snapshot.model_state import Attributes
from gemini.snapshot.rng_snapshot import Generators


class Unchanged:
    """A context that leaves a model as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> Unchanged:
        self.attributes, self.generators = Attributes(self.model), Generators()
        self.buffers = [(t, t.detach().clone()) for t in self.model.buffers() if not t.is_meta]
        self.gradients = [(p, p.grad) for p in self.model.parameters()]
        self.parameters: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for parameter, _ in self.gradients:
            parameter.grad = None
        self.hooks = unhooked(self.model.parameters())
        self.hooks.__enter__()
        return self

    def keep(self, tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        """Copies of the parameters among some tensors, with their versions; hand them to `check`."""
        return [
            (t, t.detach().clone(), t._version)
            for t in tensors
            if isinstance(t, nn.Parameter) and not t.is_meta and id(t) not in self.parameters
        ]

    def check(self, kept: list[tuple[torch.Tensor, torch.Tensor, int]]) -> bool:
        """Whether parameters were written since `keep`; the copies of those are held to the end."""
        written = [entry for entry in kept if entry[0]._version != entry[2]]
        self.hold(written)
        return bool(written)

    def hold(self, kept: list[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
        """Put these parameters back at the end."""
        self.parameters.update((id(tensor), (tensor, copy)) for tensor, copy, _ in kept)

    def __exit__(self, *_: Any) -> None:
        self.hooks.__exit__(None, None, None)
        self.attributes.restore()
        with torch.no_grad():
            for tensor, saved in (*self.buffers, *self.parameters.values()):
                tensor.data.copy_(saved)
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        self.generators.restore()
