"""Verification: the first steps of a model also in this process, and one line with the largest difference.

A step that ran by a plan is made again here, from copies of what it was given and with the same random numbers; its
loss and the gradients of all parameters are compared. Nothing of that stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import WorkerError
from gemini.log import tell

if TYPE_CHECKING:
    from gemini.runtime.deferred import Pending, StepResult

_STEPS = 3
_ALIKE = 1e-3  # of the size of what is compared, in float32


class Verification:
    """Compares the first steps of one model."""

    def __init__(self, name: str, config: GeminiConfig) -> None:
        self.name, self.config = name, config
        self.steps = 0
        self.loss = self.gradient = 0.0

    def check(self, pending: Pending, root: int, result: StepResult) -> None:
        """Compare a step with its like in this process."""
        if self.steps >= _STEPS:
            return
        from gemini.runtime.deferred.pending_call import RAN
        from gemini.runtime.local_mode import here

        before, pending.state = pending.state, RAN  # made again, not made
        try:
            with here():
                rerun = pending._again(connect=False)
                expected = rerun.values[root].detach()
                gradients = rerun.differentiate(root, torch.ones_like(expected), False, [])
        finally:
            pending.state = before
        self.steps += 1
        self.loss = max(self.loss, _difference(result.root.detach(), expected))
        for found, wanted in zip(result.parameters, gradients, strict=False):
            if found is not None and wanted is not None:
                self.gradient = max(self.gradient, _difference(found, wanted))
        if self.steps == _STEPS:
            self._report()

    def _report(self) -> None:
        is_alike = max(self.loss, self.gradient) <= _ALIKE
        text = (
            f"{self.name}: {self.steps} steps compared with this process: the loss differs by at most {self.loss:.1e}, "
            f"gradients by {self.gradient:.1e} of their size" + ("" if is_alike else ": NOT the same")
        )
        tell(f"gemini: {text}")
        if not is_alike and self.config.strict:
            raise WorkerError(f"{text}\n    → without strict=True training goes on; gemini explain says by which plan")


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the largest entry."""
    if found.is_sparse or wanted.is_sparse:
        found, wanted = found.to_dense(), wanted.to_dense()
    if not wanted.numel():
        return 0.0
    found, wanted = found.double(), wanted.double()
    size = wanted.abs().max().clamp_min(1e-12)
    return float(((found - wanted).abs().max() / size).nan_to_num(nan=float("inf")))
