"""Generators: the states of those that a step draws from, and the state in which it leaves the program's.

A worker on a device draws from the generator of that device as well as from the CPU's, so states are of both.
"""

from __future__ import annotations

import torch

from gemini.planner.step_plan import StepPlan
from gemini.random_numbers.rng_state import get_state, set_state
from gemini.runtime.devices.base import Device
from gemini.runtime.eager.placed_model import PlacedModel


def rng_states_for(plan: StepPlan, managed: PlacedModel) -> bytes | list[bytes]:
    """The states for a step: the program's own, or one a worker seeded by it; none where nothing is drawn."""
    if not plan.uses_torch_rng:
        return b""
    devices = [worker.device for worker in managed.pool.workers[: plan.schedule.ndevs]]
    if any(plan.rng_patterns):
        return get_state(devices[0], _seed_device(devices[0], managed))
    seed = int(torch.randint(2**62, ()))
    return [_from_seed(device, seed + place) for place, device in enumerate(devices)]


def apply_rng_state(plan: StepPlan, managed: PlacedModel, state: bytes) -> None:
    """Put the program's generators in the state in which a step has left those of the workers."""
    if any(plan.rng_patterns) and state:
        device = managed.pool.workers[0].device
        set_state(state, device, _seed_device(device, managed))


def _seed_device(device: Device, managed: PlacedModel) -> torch.device:
    """Whose generator the model uses in one process; workers that run plans are all on one device."""
    outside = managed.shared_parameters.outside
    return outside if outside.type == device.where.type else device.where


def _from_seed(device: Device, seed: int) -> bytes:
    kinds = ["cpu"] if device.where.type == "cpu" else ["cpu", str(device.where)]
    return b"".join(bytes(torch.Generator(kind).manual_seed(seed).get_state().numpy()) for kind in kinds)
