"""Autograd modes: the gradient, inference and autocast modes that surround an op.

The model's code enters them by context managers, which no op shows; a graph without them is silently wrong (weights
under `no_grad` get gradients, autocast runs in full precision). Each node stores the region it ran in, and the
interpreter re-enters it. Consecutive nodes of one region run inside one entry, so that the weight cache of autocast
works as in the model.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True)
class Region:
    """Gradient mode, inference mode and, per device type, the autocast dtype if autocast is on."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, str], ...]

    @staticmethod
    def current() -> Region:
        """Return the region that the calling code runs in."""
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            return _PLAIN[torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        autocast = tuple(
            (kind, True, str(torch.get_autocast_dtype(kind)).removeprefix("torch."))
            for kind in DEVICE_TYPES
            if torch.is_autocast_enabled(kind)
        )
        return Region(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    def enter(self, stack: ExitStack, ambient: Region) -> None:
        """Enter this region from the ambient one; modes that are equal are left alone."""
        if self.inference != ambient.inference:
            stack.enter_context(torch.inference_mode(self.inference))
        if self.grad != ambient.grad or self.inference != ambient.inference:
            stack.enter_context(torch.set_grad_enabled(self.grad))
        wanted = {kind: dtype for kind, _, dtype in self.autocast}
        present = {kind: dtype for kind, _, dtype in ambient.autocast}
        for kind in DEVICE_TYPES:
            if wanted.get(kind) != present.get(kind):
                dtype = getattr(torch, wanted[kind]) if kind in wanted else None
                stack.enter_context(torch.autocast(kind, enabled=kind in wanted, dtype=dtype))


_PLAIN = {(grad, inference): Region(grad, inference, ()) for grad in (True, False) for inference in (True, False)}


class RegionSwitch:
    """Switches between regions during a run; leaving it restores the ambient region."""

    def __init__(self) -> None:
        self.ambient = Region.current()
        self.active = self.ambient
        self.stack = ExitStack()

    def to(self, region: Region) -> None:
        """Switch to `region`."""
        if region == self.active:
            return
        self.stack.close()
        self.stack = ExitStack()
        region.enter(self.stack, self.ambient)
        self.active = region

    def __enter__(self) -> RegionSwitch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stack.close()
