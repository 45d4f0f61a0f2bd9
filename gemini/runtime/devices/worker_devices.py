"""Worker devices: the device of each worker, from the configuration and the model."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import nn

from gemini.config.gemini_config import GeminiConfig
from gemini.config.host_address import ANY_HOST, Address, is_address, is_tensorflow_device, worker_at
from gemini.errors import ConfigError, Fault
from gemini.runtime.devices import registry


def assign_devices(model: nn.Module, config: GeminiConfig, count: int) -> list[str]:
    """Return the device of each worker: the mapped one, or the model's. Raise ConfigError for an unavailable one.

    Devices of other hosts are `HOST/DEVICE` and are checked on their host; with a cluster, `any/DEVICE` is one on the
    host that it chooses.
    """
    if config.device_mapping is not None:
        names = [_full(name) for stage in config.device_mapping.values() for name in stage.values()]
    else:
        device = str(model_device(model))
        names = [_full(device) if registry.is_registered(device) else "cpu"] * count
        if config.cluster is not None:
            names = [f"{ANY_HOST}/{name.partition(':')[0]}" for name in names]
    _refuse_tensorflow_names(names)
    registry.check_devices([name for name in names if not is_address(name)])
    _check_kinds([found for name in names if (found := worker_at(name)) is not None], model_device(model))
    return names


def _refuse_tensorflow_names(names: list[str]) -> None:
    faults = [
        Fault(f"device_mapping names {name}, a device of TensorFlow, for a model of PyTorch", "write cpu or cuda:0")
        for name in names
        if is_tensorflow_device(name)
    ]
    if faults:
        raise ConfigError(faults)


def _check_kinds(workers: list[Address], device: torch.device) -> None:
    """Raise ConfigError for a remote worker on another kind of device than the model's: its numbers would differ."""
    faults = [
        Fault(
            f"{worker} computes on {worker.device.partition(':')[0]}, the model is on {device}",
            f"move the model to such a device first, or map the worker to {worker.host}/{device.type}",
        )
        for worker in workers
        if worker.device.partition(":")[0] != device.type
    ]
    if faults:
        raise ConfigError(faults)


def model_device(model: nn.Module) -> torch.device:
    """Return the device of most of the model's tensors."""
    counts: dict[torch.device, int] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        counts[tensor.device] = counts.get(tensor.device, 0) + 1
    return max(counts, key=lambda device: counts[device], default=torch.device("cpu"))


def _full(name: str) -> str:
    """Return the name with an index, except for the CPU."""
    if (found := worker_at(name)) is not None:
        return str(replace(found, device=_full(found.device)))
    if name.partition(":")[0] == "cpu":
        return "cpu"
    return name if ":" in name else f"{name}:0"
