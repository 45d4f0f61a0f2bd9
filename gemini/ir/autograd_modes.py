"""Regions: the modes of execution that surround an op (gradients, inference, autocast).

They are Python context managers of the model's code, invisible in the ops themselves; a graph that forgets them
is silently wrong (weights under `no_grad` get gradients, autocast runs in full precision). Each node stores the
region it ran in, and the executor re-enters it. Neighbouring nodes of one region run inside one entry, so that
the weight cache of autocast works as in the original.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True)
class Region:
    """Gradient mode, inference mode and, per device type, whether autocast is on and to what."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, str], ...]

    @staticmethod
    def current() -> Region:
        """The region that the calling code runs in."""
        if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
            return _PLAIN[torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        autocast = tuple(
            (kind, True, str(torch.get_autocast_dtype(kind)).removeprefix("torch."))
            for kind in DEVICE_TYPES
            if torch.is_autocast_enabled(kind)
        )
        return Region(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    def enter(self, stack: ExitStack, ambient: Region) -> None:
        """Enter this region from the ambient one; what is equal is left alone."""
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
    """Moves between regions during a run; leaving it restores the ambient region."""

    def __init__(self) -> None:
        self.ambient = Region.current()
        self.now = self.ambient
        self.stack = ExitStack()

    def to(self, region: Region) -> None:
        """Be in `region` from here on."""
        if region == self.now:
            return
        self.stack.close()
        self.stack = ExitStack()
        region.enter(self.stack, self.ambient)
        self.now = region

    def __enter__(self) -> RegionSwitch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stack.close()
