"""Mixed cluster: a pipeline over devices of several classes, its layers by dynamic programme.

    groups       16 × h100 │ 16 × a100               replicas 4, tensor 4:  one stage of each class per …
    stages       0         │ 1                        a stage is a tensor group of one class in each replica
    layers       54        │ 26                       faster devices take more, as far as their memory goes

For every replica count, tensor degree, micro-batch, recomputation and order of the classes:

    best(g, l) = min over n of max(best(g − 1, l − n), time of n layers on the stages of class g)

with n infeasible where the first stage of the class, which has most micro-batches in flight, lacks the memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

from gemini.cluster.cluster_description import HostGroup
from gemini.cluster.device_class import DeviceClass
from gemini.errors import ConfigError, Fault, GeminiError
from gemini.tune.layer_cost import CostModel, LayerCost
from gemini.tune.memory_table import CONTEXT, static_rows
from gemini.tune.parallel_config import ParallelConfig
from gemini.tune.pipeline_run import run_pipeline
from gemini.tune.rank_communication import RankCommunication
from gemini.tune.search_space import Rejections
from gemini.tune.stage_costs import StageBuilder, StageCost
from gemini.tune.step_report import duration
from gemini.tune.step_simulation import StepResult, predict
from gemini.tune.tuner import tune
from gemini.tune.tuning_request import TuningRequest
from gemini.tune.tuning_result import TuningResult

_SIMULATED, _LEAST_SIMULATED = 12, 3
_MICRO_BATCHES = (1, 2, 4, 8)
_RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class _Class:
    """A device class with the number of stages it has, and the costs of one layer on it."""

    device: DeviceClass
    stages: int
    layer: StageCost
    most: int  # layers that one of its stages can hold


@dataclass(frozen=True)
class _Candidate:
    """A configuration with its layers per stage, and the bound of its time."""

    bound: float
    config: ParallelConfig
    layout: tuple[int, ...]
    places: tuple[DeviceClass, ...]


def tune_mixed(request: TuningRequest, *, progress: Callable[[int, int, str], None] | None = None) -> TuningResult:
    """Search the pipelines over all classes of a cluster; an interrupt keeps what was found so far."""
    began, report = time.perf_counter(), progress or (lambda *_: None)
    candidates: list[_Candidate] = []
    rejections = Rejections()
    stopped = False
    try:
        orders = list(dict.fromkeys(permutations(request.cluster.groups)))
        for at, order in enumerate(orders):
            report(at, len(orders), "search orders of the device classes")
            candidates += _search_order(request, order, rejections)
    except KeyboardInterrupt:
        stopped = True
    candidates.sort(key=lambda one: one.bound)
    results: list[StepResult] = []
    simulated = time.perf_counter()
    for index, one in enumerate(candidates[:_SIMULATED]):
        if len(results) >= _LEAST_SIMULATED and time.perf_counter() - simulated > request.simulate_seconds:
            break
        report(index, _SIMULATED, "simulate the best")
        try:
            found = predict(request.model, request.cluster, one.config, run_pipeline, one.layout, one.places)
        except GeminiError:
            continue
        if found.fits:
            results.append(found)
    alone = [] if stopped else search_alone(request)
    if not results:
        listed = "; ".join(f"{reason} ({count})" for reason, count in rejections.counts.most_common(3))
        what = f"no pipeline over these device classes: {listed or 'their devices do not divide into equal stages'}"
        able = f"; {_describe_alone(alone[0])}" if alone else ""
        raise ConfigError(
            [Fault(what, f"free a fixed degree, change the batch, or tune one class alone{able}")], "tuning"
        )
    results.sort(key=lambda one: one.seconds)
    notes = [_describe_alone(one) for one in alone if one.seconds < results[0].seconds]
    took = time.perf_counter() - began
    return TuningResult(request, tuple(results), tuple(results), rejections, took, stopped, notes=tuple(notes))


def search_alone(request: TuningRequest) -> list[StepResult]:
    """Return the best configuration of every group alone, fastest first: slow devices can delay fast ones."""
    found = []
    for group in request.cluster.groups:
        cluster = replace(request.cluster, groups=(group,))
        fixed = {name: value for name, value in request.fixed.items() if name not in ("devices", "pipeline")}
        with contextlib.suppress(GeminiError):
            among = {"chunks": (1,), "micro_batch": _MICRO_BATCHES, **request.among}  # what pipelines over all have
            among = {name: values for name, values in among.items() if name not in fixed}
            one = replace(request, cluster=cluster, fixed=fixed, among=among, max_devices=None, finalists=3, composed=0)
            found.append(tune(one).best)
    return sorted(found, key=lambda one: one.seconds)


def _describe_alone(result: StepResult) -> str:
    what = f"{result.config.devices} × {result.cluster.device_names} alone"
    return f"{what} take {duration(result.seconds)}: {result.config.label()}"


def _search_order(request: TuningRequest, groups: Sequence[HostGroup], rejections: Rejections) -> list[_Candidate]:
    found = []
    devices = [group.devices for group in groups]
    total = sum(devices)
    most = min(group.devices_per_host for group in groups)
    for tensor in _chosen(request, "tensor", [one for one in (1, 2, 4, 8) if most % one == 0]):
        for data in [
            one for one in range(1, min(devices) + 1) if all(count % (one * tensor) == 0 for count in devices)
        ]:
            stages = [count // (data * tensor) for count in devices]
            depth = sum(stages)
            if depth > request.model.layers + 2 or request.fixed.get("pipeline", depth) != depth:
                continue
            if request.batch % data:
                rejections.add("the batch cannot be split over the replicas", f"data {data}")
                continue
            for micro_batch in _chosen(request, "micro_batch", _MICRO_BATCHES):
                if request.batch // data % micro_batch:
                    continue
                for recompute in _chosen(request, "recompute", _RECOMPUTE):
                    fixed = {k: v for k, v in request.fixed.items() if k not in ("devices", "pipeline")}
                    config = ParallelConfig(**{
                        **fixed, "devices": total, "batch": request.batch, "tensor": tensor, "pipeline": depth,
                        "micro_batch": micro_batch, "recompute": recompute, "zero": min(1, data - 1),
                    })  # fmt: skip
                    if request.model.faults(config):
                        continue
                    candidate = _assign(request, config, groups, stages, rejections)
                    if candidate is not None:
                        found.append(candidate)
    return found


def _chosen(request: TuningRequest, name: str, default: Sequence[Any]) -> Sequence[Any]:
    if name in request.fixed:
        return (request.fixed[name],)
    values: Sequence[Any] = request.among.get(name, tuple(default))
    return values


def _assign(
    request: TuningRequest, config: ParallelConfig, groups: Sequence[HostGroup], stages: Sequence[int],
    rejections: Rejections,
) -> _Candidate | None:  # fmt: skip
    """Return the best assignment of layers to the classes, in this order."""
    model, links = request.model, RankCommunication(request.cluster, config)
    classes, place = [], 0
    for group, count in zip(groups, stages):
        classes.append(_describe(model, config, group.device, count, place, links))
        place += count
    counts = assign_layers(model.layers, [(one.layer.total, one.stages, one.most) for one in classes])
    if counts is None:
        rejections.add("more memory than the devices have", config.label())
        return None
    layout = tuple(layers for per_stage in counts for layers in per_stage)
    places = tuple(one.device for one in classes for _ in range(one.stages))
    slowest = max(n * one.layer.total for one, held in zip(classes, counts) for n in held)
    bound = (config.micro_batches + config.pipeline - 1) * slowest
    return _Candidate(bound, config, layout, places)


def assign_layers(layers: int, classes: Sequence[tuple[float, int, int]]) -> list[tuple[int, ...]] | None:
    """Return the layers of every stage of every class with the least slowest stage; None where they do not fit.

    A class is (seconds of a layer, number of stages, most layers per stage).
    """
    none = float("inf")
    best = [0.0] + [none] * layers
    choices: list[list[int]] = []
    for seconds, stages, most in classes:
        step, choice = [none] * (layers + 1), [0] * (layers + 1)
        for held in range(layers + 1):
            for own in range(min(held, stages * most) + 1):
                slowest = max(best[held - own], -(-own // stages) * seconds)
                if slowest < step[held]:
                    step[held], choice[held] = slowest, own
        best = step
        choices.append(choice)
    if best[layers] == none:
        return None
    counts, left = [], layers
    for (_, stages, _), choice in zip(reversed(classes), reversed(choices)):
        own = choice[left]
        base, extra = divmod(own, stages)
        counts.append(tuple(base + (index < extra) for index in range(stages)))
        left -= own
    return counts[::-1]


def _describe(  # noqa: PLR0917
    model: CostModel, config: ParallelConfig, device: DeviceClass, stages: int, place: int,
    links: RankCommunication,
) -> _Class:  # fmt: skip
    """Return a class whose first stage is at `place`: the mean layer, and how many of them its memory holds."""
    builder = StageBuilder(model, config, device, links)
    one = builder.stages((model.layers,) + (0,) * (config.pipeline - 1))[0]
    mean = 1 / model.layers
    layer = replace(
        one, forward=one.forward * mean, input_gradient=one.input_gradient * mean,
        weight_gradient=one.weight_gradient * mean, activations=one.activations * mean,
    )  # fmt: skip
    flight = min(config.micro_batches, config.pipeline - place)
    ends: list[LayerCost] = [builder.first] if place == 0 else []
    if place + stages == config.pipeline:
        ends.append(builder.last)
    room = device.memory_bytes - CONTEXT - one.workspace - sum(end.workspace for end in ends)
    room -= sum(size for _, size in static_rows(config, sum(end.parameters for end in ends), 0.0, 0.0))
    per_layer = sum(
        size for name, size in static_rows(config, one.parameters * mean, one.expert_parameters * mean, 0.0)
        if name != "buffers"
    )  # fmt: skip
    per_layer += 1.03 * flight * layer.activations
    return _Class(device, stages, layer, max(0, int(room / per_layer)))
