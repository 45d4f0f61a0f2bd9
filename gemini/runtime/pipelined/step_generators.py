"""Step generators: the random generator states that a step starts from, and the state that it leaves.

A worker on a device uses the generator of that device as well as the CPU's, so states include both.
"""

from __future__ import annotations

import torch

from gemini.planner.step_plan import StepPlan
from gemini.random_numbers.rng_state import get_state, set_state
from gemini.runtime.devices.base import Device
from gemini.runtime.eager.placed_model import PlacedModel


def rng_states_for(plan: StepPlan, managed: PlacedModel) -> bytes | list[bytes]:
    """Return the states for a step: the script's own, or one per worker seeded from it; empty without randomness."""
    if not plan.uses_torch_rng:
        return b""
    devices = [worker.device for worker in managed.pool.workers[: plan.nworkers]]
    if any(plan.rng_patterns):
        return get_state(devices[0], _seed_device(devices[0], managed))
    seed = int(torch.randint(2**62, ()))
    return [_from_seed(device, seed + place) for place, device in enumerate(devices)]


def apply_rng_state(plan: StepPlan, managed: PlacedModel, state: bytes) -> None:
    """Set the script's generators to the state in which a step has left those of the workers."""
    if any(plan.rng_patterns) and state:
        device = managed.pool.workers[0].device
        set_state(state, device, _seed_device(device, managed))


def _seed_device(device: Device, managed: PlacedModel) -> torch.device:
    """Return the device whose generator the model uses in one process; workers of plans are all on one device."""
    outside = managed.shared_parameters.model_device
    return outside if outside.type == device.where.type else device.where


def _from_seed(device: Device, seed: int) -> bytes:
    kinds = ["cpu"] if device.where.type == "cpu" else ["cpu", str(device.where)]
    return b"".join(bytes(torch.Generator(kind).manual_seed(seed).get_state().numpy()) for kind in kinds)
