"""The device of a worker on another host, as the controller sees it.

Its tensors are here where the model is, and there on the worker's own device: what is sent arrives on the other one.
So here it behaves as the model's device does, but no memory of it can be shared.
"""

from __future__ import annotations

import torch

from gemini.runtime.devices.base import Device


class RemoteDevice(Device):
    """Seen from here: the model's device, under the name of the worker's."""

    def __init__(self, name: str, home: Device) -> None:
        super().__init__(home.index)
        self._name, self.home = name, home
        self.kind = home.kind

    @property
    def name(self) -> str:
        """As in a device mapping: no tensor of this host has a home there."""
        return self._name

    @property
    def where(self) -> torch.device:
        """Of its tensors, here."""
        return self.home.where

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the model's device."""
        return self.home.owns(tensor)

    def get_generator(self, device: torch.device) -> bytes:
        """Of the model's device: its random numbers are drawn there."""
        return self.home.get_generator(device)

    def set_generator(self, device: torch.device, state: bytes) -> None:
        """Of the model's device."""
        self.home.set_generator(device, state)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Of the model's device."""
        return self.home.is_out_of_memory(error)

    def finish(self) -> None:
        """Of the model's device."""
        self.home.finish()


def gpu_identity(device: Device) -> str:
    """What tells one GPU of NVIDIA's from all others, on any host; '' for other devices."""
    if device.where.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device.where).uuid)
