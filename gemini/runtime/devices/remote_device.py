"""Remote device: the device of a worker on another host, as the controller sees it.

On this host its tensors lie on the model's device, on the worker's host on the worker's device; a tensor that is sent
arrives on the other one. It behaves like the model's device, but none of its memory can be shared.
"""

from __future__ import annotations

import torch

from gemini.runtime.devices.base import Device


class RemoteDevice(Device):
    """The model's device under the name of the worker's."""

    def __init__(self, name: str, local: Device) -> None:
        super().__init__(local.index)
        self._name, self.local = name, local
        self.kind = local.kind

    @property
    def name(self) -> str:
        """The name in a device mapping; no tensor of this host is stored under it."""
        return self._name

    @property
    def where(self) -> torch.device:
        """The device of its tensors on this host."""
        return self.local.where

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the model's device."""
        return self.local.owns(tensor)

    def get_generator(self, device: torch.device) -> bytes:
        """Return the generator state of the model's device."""
        return self.local.get_generator(device)

    def set_generator(self, device: torch.device, state: bytes) -> None:
        """Set the generator state of the model's device."""
        self.local.set_generator(device, state)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Delegate to the model's device."""
        return self.local.is_out_of_memory(error)

    def finish(self) -> None:
        """Synchronize the model's device."""
        self.local.finish()


def gpu_identity(device: Device) -> str:
    """Return the UUID of an NVIDIA GPU, unique across hosts; '' for other devices."""
    if device.where.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device.where).uuid)
