"""Tied parameters: gradients of parameters that several stages use, in a detached backward.

The backward of each stage computes a part of their gradient. The parts are summed in the order of the eager run; hooks
of the script and gradients of earlier steps see the sum only, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class TiedGradients:
    """A context in which tied parameters accumulate their gradient separately; its exit adds the sum."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        users: dict[int, int] = {}
        self.of_stage = [{id(p): p for p in stage.parameters() if p.requires_grad} for stage in stages]
        for held in self.of_stage:
            for key in held:
                users[key] = users.get(key, 0) + 1
        self.of_stage = [{key: p for key, p in held.items() if users[key] > 1} for held in self.of_stage]
        self.parameters = list({key: p for held in self.of_stage for key, p in held.items()}.values())
        self._saved: list[tuple[nn.Parameter, Any, Any, Any]] = []

    def parts(self, stage: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (parameter, gradient so far) of the tied parameters of a stage, as roots of its backward."""
        found = []
        for parameter in self.of_stage[stage].values():
            if parameter.grad is not None:
                found.append((parameter, parameter.grad))
                parameter.grad = None
        return found

    def __enter__(self) -> TiedGradients:
        for p in self.parameters:
            self._saved.append((p, p.grad, p._backward_hooks, p._post_accumulate_grad_hooks))
            # An empty dictionary: None would leave the hooks active.
            p.grad, p._backward_hooks, p._post_accumulate_grad_hooks = None, None, {}
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: Any) -> None:
        for parameter, before, hooks, late_hooks in self._saved:
            total = parameter.grad
            parameter.grad, parameter._backward_hooks = before, hooks
            parameter._post_accumulate_grad_hooks = late_hooks
            if total is not None and failed is None:
                torch.autograd.backward([parameter], [total])
        self._saved = []
