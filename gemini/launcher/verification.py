"""Verification: repeats the first steps of a model in this process and reports the largest difference.

A planned step is rerun locally, from copies of its inputs and with the same random numbers; its loss and the gradients
of all parameters are compared. The rerun has no side effects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import WorkerError
from gemini.log import log_line

if TYPE_CHECKING:
    from gemini.runtime.deferred import PendingCall, StepResult

_STEPS = 3
_TOLERANCE = 1e-3  # relative, in float32


class Verification:
    """Compares the first steps of one model."""

    def __init__(self, name: str, config: GeminiConfig) -> None:
        self.name, self.config = name, config
        self.steps = 0
        self.loss = self.gradient = 0.0

    def check(self, pending: PendingCall, root: int, result: StepResult) -> None:
        """Compare a step with its rerun in this process."""
        if self.steps >= _STEPS:
            return
        from gemini.runtime.deferred.pending_call import RAN
        from gemini.runtime.local_mode import run_locally

        before, pending.state = pending.state, RAN  # a rerun, not the first execution
        try:
            with run_locally():
                rerun = pending._rerun(connect=False)
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
        is_equal = max(self.loss, self.gradient) <= _TOLERANCE
        text = (
            f"{self.name}: {self.steps} steps compared with this process: the loss differs by at most {self.loss:.1e}, "
            f"gradients by {self.gradient:.1e} relative" + ("" if is_equal else ": NOT equal")
        )
        log_line(f"gemini: {text}")
        if not is_equal and self.config.strict:
            raise WorkerError(f"{text}\n    → without strict=True training continues; gemini explain shows the plan")


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference relative to the largest entry."""
    if found.is_sparse or wanted.is_sparse:
        found, wanted = found.to_dense(), wanted.to_dense()
    if not wanted.numel():
        return 0.0
    found, wanted = found.double(), wanted.double()
    size = wanted.abs().max().clamp_min(1e-12)
    return float(((found - wanted).abs().max() / size).nan_to_num(nan=float("inf")))
