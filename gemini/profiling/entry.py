"""`profile(graph)`: the costs of every node of a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gemini.cache_files import cache_folder
from gemini.errors import ProfileError
from gemini.ir.call_binding import ModelCall
from gemini.ir.graph import Graph
from gemini.profiling.device_specs import DeviceSpec, find_spec, spec_like
from gemini.profiling.measured_device import Device, find_device
from gemini.profiling.profile_cache import ProfileCache
from gemini.profiling.profile_inputs import input_tensors
from gemini.profiling.profile_result import Profile
from gemini.profiling.profiler import Profiler, Progress
from gemini.profiling.timing_rounds import TimeBudget


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
    """Measure or estimate the costs of every node of a graph.

    `args` and `kwargs` are a batch as for the model; without them one is generated from the captured sizes. `device` is
    where nodes are measured (default: the model's device). `analytic` names a device description instead: nothing is
    run, and the model may be on the meta device; with a `device` as well, the description is first calibrated by nodes
    measured there. `cache` may be a folder, or False.
    """
    if not isinstance(rounds, int) or rounds < 1:
        raise ProfileError(f"rounds={rounds!r}\n    → pass an integer, 1 or more")
    model = graph.bound_model()
    model_device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    estimated = analytic is not None or model_device.type == "meta"
    found = None if estimated and device is None else find_device(device if device is not None else model_device)
    budget = None if found is None else TimeBudget(found)
    inputs = input_tensors(graph, args, kwargs)
    call = None if args is None and kwargs is None else ModelCall(args or (), kwargs or {})
    job = Profiler(
        graph=graph, inputs=inputs, call=call, rounds=rounds, check=check, report=progress or (lambda *_: None)
    )
    if estimated or found is None or budget is None:
        return job.analytic(_spec(analytic, found), found)
    folder = cache_folder("profiles") if cache is True else Path(cache) if cache else None
    return job.measure(found, ProfileCache(folder, found.describe()), budget)


def _spec(analytic: str | DeviceSpec | None, device: Device | None) -> DeviceSpec:
    """Return the requested description, else one like the device, else that of a CPU."""
    if isinstance(analytic, DeviceSpec):
        return analytic
    if analytic is not None or device is None:
        return find_spec(analytic or "cpu")
    return spec_like(device.kind, device.describe())
