"""Placing: the device of each worker, from the configuration and the model."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from gemini.config import GeminiConfig
from gemini.runtime.devices import registry


def devices_of(model: nn.Module, config: GeminiConfig, count: int) -> list[str]:
    """The device of each worker: as mapped, or else where the model is. Raises ConfigError for one that is not here."""
    if config.device_mapping is not None:
        names = [_full(name) for stage in config.device_mapping.values() for name in stage.values()]
    else:
        home = str(home_of(model))
        names = [_full(home) if registry.knows(home) else "cpu"] * count
    registry.check(names)
    return names


def home_of(model: nn.Module) -> torch.device:
    """The device that the program has put the model on: that of most of its tensors."""
    counts: dict[torch.device, int] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        counts[tensor.device] = counts.get(tensor.device, 0) + 1
    return max(counts, key=lambda device: counts[device], default=torch.device("cpu"))


def _full(name: str) -> str:
    """With a number, except for the CPU."""
    if name.partition(":")[0] == "cpu":
        return "cpu"
    return name if ":" in name else f"{name}:0"
