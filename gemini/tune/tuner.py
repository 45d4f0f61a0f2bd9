"""Tuner: the best configuration of a model on a cluster.

enumerate ─► lower bound of memory ─► closed form ─► the best 20 by their real schedule
          ─► composed schedules for the best 3 ─► ranked table, frontier, reasons
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from gemini.cluster.cluster_description import Cluster
from gemini.errors import ConfigError, Fault, GeminiError
from gemini.tune.composed_schedule import compose_schedule
from gemini.tune.memory_table import CONTEXT
from gemini.tune.parallel_config import RECOMPUTE, ParallelConfig
from gemini.tune.search_space import Rejections, bound_memory, enumerate_configurations
from gemini.tune.step_simulation import StepResult, estimate, simulate
from gemini.tune.tuning_request import TuningRequest
from gemini.tune.tuning_result import TuningResult

Progress = Callable[[int, int, str], None]
_MOST_DEVICES = 1 << 20
_LEAST_SIMULATED = 3
_VARIED = 60  # configurations of which variants with more recomputation are added to the frontier


def tune(request: TuningRequest, *, progress: Progress | None = None) -> TuningResult:
    """Search and return the ranked result; an interrupt keeps what was found so far."""
    began = time.perf_counter()
    report = progress or (lambda *_: None)
    found: list[StepResult] = []
    rejections = Rejections()
    stopped = False
    try:
        counts = request.device_counts()
        for at, devices in enumerate(counts):
            report(at, len(counts), f"search configurations on {devices} devices")
            for one in search_closed_form(request, resize(request.cluster, devices), rejections):
                found.append(one)  # one by one: an interrupt keeps them
    except KeyboardInterrupt:
        stopped = True
    if not found:
        if stopped:
            raise KeyboardInterrupt
        raise ConfigError([_explain_nothing(request, rejections)], "tuning")
    found.sort(key=lambda one: score(request, one))
    found = sorted([*found, *add_recomputation(request, found)], key=lambda one: score(request, one))
    ranked = found[: request.finalists]
    try:
        few = replace(request, finalists=_LEAST_SIMULATED, composed=0) if stopped else request
        ranked = simulate_finalists(few, found, report)
    except KeyboardInterrupt:
        stopped = True
    return TuningResult(request, tuple(ranked), tuple(found), rejections, time.perf_counter() - began, stopped)


def resize(cluster: Cluster, devices: int) -> Cluster:
    """Return the cluster with that number of devices."""
    return cluster if cluster.devices == devices else cluster.resized(devices)


def score(request: TuningRequest, result: StepResult) -> float:
    """Return what the search minimizes."""
    return result.money if request.objective == "money" else result.seconds


def search_closed_form(request: TuningRequest, cluster: Cluster, rejections: Rejections) -> Iterator[StepResult]:
    """Yield all configurations within memory and limits, predicted by closed form."""
    capacity = cluster.device.memory_bytes
    allowed = (capacity - CONTEXT) * request.memory_share + CONTEXT
    fitting: tuple[object, ...] = ()
    for config in enumerate_configurations(request, cluster, rejections):
        key = _all_but_recompute(config)
        if key == fitting:  # it fits with less recomputation, which is faster
            continue
        least = bound_memory(request.model, cluster, config)
        if least > allowed:
            rejections.least_memory = min(rejections.least_memory, least)
            rejections.add("more memory than a device has", config.label())
            continue
        result = estimate(request.model, cluster, config)
        if result.memory.total + CONTEXT > allowed:
            rejections.least_memory = min(rejections.least_memory, result.memory.total + CONTEXT)
            rejections.add("more memory than a device has", config.label())
        elif reason := broken_limit(request, result):
            rejections.add(reason, config.label())
        else:
            fitting = key
            yield replace(result, stages=(), run=replace(result.run, plan=None))


def _all_but_recompute(config: ParallelConfig) -> tuple[object, ...]:
    return (
        config.tensor, config.context, config.expert, config.pipeline, config.chunks, config.micro_batch, config.zero,
        config.schedule, config.order,
    )  # fmt: skip


def add_recomputation(request: TuningRequest, found: list[StepResult]) -> list[StepResult]:
    """Return the best configurations with more recomputation, which the search leaves out: they need less memory."""
    if "recompute" in request.fixed:
        return []
    known = request.among.get("recompute", tuple(one for one in RECOMPUTE if one != "attention"))
    more = []
    for one in found[:_VARIED]:
        for recompute in known:
            if RECOMPUTE.index(recompute) > RECOMPUTE.index(one.config.recompute):
                result = estimate(request.model, one.cluster, replace(one.config, recompute=recompute))
                more.append(replace(result, stages=(), run=replace(result.run, plan=None)))
    return [one for one in more if not broken_limit(request, one)]


def broken_limit(request: TuningRequest, result: StepResult) -> str:
    """Return the limit that a prediction exceeds; '' where it keeps all."""
    if request.max_seconds is not None and result.seconds > request.max_seconds:
        return f"a step longer than {request.max_seconds:g} s"
    if request.tokens is not None:
        steps = request.tokens / result.tokens
        if request.max_hours is not None and steps * result.seconds / 3600 > request.max_hours:
            return f"a training longer than {request.max_hours:g} hours"
        if request.max_money is not None and steps * result.money > request.max_money:
            return f"a training that costs more than {request.max_money:g}"
    return ""


def simulate_finalists(request: TuningRequest, found: list[StepResult], report: Progress) -> list[StepResult]:
    """Return the best by closed form, predicted by their real schedules and ranked again."""
    ranked: list[StepResult] = []
    began = time.perf_counter()
    first: dict[int, StepResult] = {}  # of every number of devices: a search over these compares them
    for one in found:
        first.setdefault(one.config.devices, one)
    best = sorted(first.values(), key=lambda one: score(request, one))[:_LEAST_SIMULATED]
    for index, estimated in enumerate([*best, *(one for one in found if one not in best)]):
        late = index >= _LEAST_SIMULATED and time.perf_counter() - began > request.simulate_seconds
        if ranked and (late or index >= request.finalists):  # the closed form can be too optimistic
            break
        report(min(index, request.finalists), request.finalists, "simulate the best")
        result = _simulate(request, estimated)
        if result is not None and result.fits:
            ranked.append(result)
    if not ranked:
        fault = Fault(f"none of {len(found)} configurations fits with its schedule", "use more or larger devices")
        raise ConfigError([fault], "tuning")
    ranked.sort(key=lambda one: score(request, one))
    budget = request.compose_seconds / max(1, request.composed)
    chosen = {"schedule"} & {*request.fixed, *request.among}  # by the user
    for index, result in enumerate(() if chosen else ranked[: request.composed]):
        report(index, request.composed, "compose schedules")
        better = compose_schedule(request.model, result, budget)
        known = {one.config.label() for one in ranked}
        if better is None or not better.fits or better.config.label() in known:
            continue
        if score(request, better) < score(request, result):
            ranked.append(better)
    ranked.sort(key=lambda one: score(request, one))
    return ranked


def _simulate(request: TuningRequest, estimated: StepResult) -> StepResult | None:
    try:
        return simulate(request.model, estimated.cluster, estimated.config)
    except GeminiError:  # the schedule does not exist for these degrees
        return None


# ── nothing fits ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _explain_nothing(request: TuningRequest, rejections: Rejections) -> Fault:
    if not rejections.counts:
        return Fault("no configuration exists for these degrees", "free one of the fixed degrees")
    reason, count = rejections.counts.most_common(1)[0]
    if reason.startswith("more memory"):
        capacity = request.cluster.device.memory_bytes
        what = (
            f"{request.model.name} fits nowhere: the smallest of {count} configurations needs at least "
            f"{rejections.least_memory / 2**30:.1f} GiB per device, {request.cluster.device.name} has "
            f"{capacity / 2**30:.1f}"
        )
        least = least_devices(request)
        more = f"{least} devices would do" if least else "no number of such devices would do: use larger ones"
        return Fault(what, more)
    listed = "; ".join(
        f"{one} ({number}, such as {rejections.examples[one]})" for one, number in rejections.counts.most_common(3)
    )
    return Fault(f"no configuration keeps all limits: {listed}", "relax that limit or free a degree")


def least_devices(request: TuningRequest) -> int:
    """Return the least number of devices on which some configuration fits, by doubling; 0 where none does."""
    if not request.cluster.is_homogeneous:
        return 0
    devices = max(request.device_counts())
    while devices < _MOST_DEVICES and devices <= 64 * request.cluster.devices:
        devices *= 2
        cluster = resize(request.cluster, devices)
        batch = max(request.batch, devices)
        wider = replace(request, cluster=cluster, batch=batch, max_devices=None)
        for config in enumerate_configurations(wider, cluster, Rejections()):
            if config.micro_batch == 1 and _fits(wider, cluster, config):
                return devices
    return 0


def _fits(request: TuningRequest, cluster: Cluster, config: ParallelConfig) -> bool:
    if bound_memory(request.model, cluster, config) > cluster.device.memory_bytes:
        return False
    return estimate(request.model, cluster, config).fits
