"""The entry: `profile(graph)`, from a graph to its costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gemini.errors import ProfileError
from gemini.ir.call_binding import Call
from gemini.ir.graph import Graph
from gemini.profiling.device_specs import DeviceSpec, find_spec, spec_like
from gemini.profiling.measured_device import Device, find_device
from gemini.profiling.profile_cache import Cache, default_folder
from gemini.profiling.profile_inputs import input_tensors
from gemini.profiling.profile_result import Profile
from gemini.profiling.profiler import Profiling, Progress
from gemini.profiling.timing_rounds import Budget


def profile(
    graph: Graph,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    device: str | torch.device | Device | None = None,
    analytic: str | DeviceSpec | None = None,
    rounds: int = 3,
    check: bool = True,
    cache: bool | str | Path = True,
    progress: Progress | None = None,
) -> Profile:
    """The costs of every node of a graph.

    `args` and `kwargs` are a batch as the model takes it; without them one is made up from the sizes captured.
    `device` is where nodes are measured (default: where the model is). `analytic` names a device description
    instead: nothing is run, and the model may be on the meta device; with a `device` too, the description is first
    calibrated by nodes measured there. `cache` may be a folder, or False.
    """
    if not isinstance(rounds, int) or rounds < 1:
        raise ProfileError(f"rounds={rounds!r}\n    → give a whole number, 1 or more")
    model = graph.bound_model()
    home = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    estimated = analytic is not None or home.type == "meta"
    found = None if estimated and device is None else find_device(device if device is not None else home)
    budget = None if found is None else Budget(found)
    inputs = input_tensors(graph, args, kwargs)
    call = None if args is None and kwargs is None else Call(args or (), kwargs or {})
    job = Profiling(
        graph=graph, inputs=inputs, call=call, rounds=rounds, check=check, tell=progress or (lambda *_: None)
    )
    if estimated or found is None or budget is None:
        return job.analytic(_spec(analytic, found), found)
    folder = default_folder() if cache is True else Path(cache) if cache else None
    return job.measured(found, Cache(folder, found.describe()), budget)


def _spec(analytic: str | DeviceSpec | None, device: Device | None) -> DeviceSpec:
    """The description asked for, else one like the device, else the plainest."""
    if isinstance(analytic, DeviceSpec):
        return analytic
    if analytic is not None or device is None:
        return find_spec(analytic or "cpu")
    return spec_like(device.kind, device.describe())
