"""Profiler: one profiling run, from classes of equivalent nodes to the costs of all nodes.

node classes ──► cache ──► measured in rounds, or counted and estimated ──► node costs
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gemini.ir.call_binding import ModelCall
from gemini.ir.graph import Graph
from gemini.malloc import retain_freed_memory
from gemini.profiling.class_measurement import ANALYTIC, MEASURED, Measurement
from gemini.profiling.cost_assembly import CostAssembly
from gemini.profiling.cost_signature import node_class_signature
from gemini.profiling.device_specs import DeviceSpec, spec_like
from gemini.profiling.flop_count import KernelCounts
from gemini.profiling.gradient_flow import GradientFlow
from gemini.profiling.graph_walk import GraphWalk
from gemini.profiling.host_time import step_times
from gemini.profiling.measured_device import Device, find_device, is_on_other_device
from gemini.profiling.meta_run import MetaWalk
from gemini.profiling.node_classes import ClassSurvey, NodeClass
from gemini.profiling.preserved_model import PreservedModel
from gemini.profiling.profile_cache import ProfileCache
from gemini.profiling.profile_result import Check, Profile
from gemini.profiling.reading_statistics import ClassTimes, Reading, summarize
from gemini.profiling.roofline import calibrate, estimate_ms, measure_probe_modules
from gemini.profiling.timing_rounds import TimeBudget, TimingRounds
from gemini.quiet_warnings import mute_warnings

Progress = Callable[[int, int, str], None]
MOST_ROUNDS = 20  # for very short steps; otherwise the time budget ends rounds sooner
CALIBRATED = 8  # node classes used to calibrate a description
QUIET = 0.02  # time-weighted noise below which no further round is needed


class Profiler:
    """One profiling run of a graph."""

    def __init__(
        self,
        *,
        graph: Graph,
        inputs: dict[int, torch.Tensor],
        call: ModelCall | None,
        rounds: int,
        check: bool,
        report: Progress,
    ) -> None:
        self.graph, self.inputs, self.call, self.report = graph, inputs, call, report
        self.rounds, self.check = rounds, check
        self.flow = GradientFlow(graph)
        self.signatures = {node.id: node_class_signature(graph, node, self.flow) for node in graph.compute_nodes}
        self.classes: dict[str, NodeClass] = {}
        for member, signature in self.signatures.items():
            self.classes.setdefault(signature, NodeClass(signature)).members.append(member)

    # ── analytic ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def analytic(self, spec: DeviceSpec, device: Device | None) -> Profile:
        """Estimate costs from counted work and a device description."""
        self.report(0, 1, "counting work")
        notes: tuple[str, ...] = ()
        with PreservedModel(self.graph.bound_model()) as state, mute_warnings():
            self._count_work(state)
            self._count_on_values(state)
            if device is not None:
                spec, note = self._calibrate(spec, device, state)
                notes = (note,)
        measurements = {
            found.signature: _estimate(found, spec, f"analytic: {spec.name}") for found in self.classes.values()
        }
        self.report(1, 1, "done")
        return self._profile(
            device=spec.name,
            mode=ANALYTIC,
            measurements=measurements,
            steps=[],
            step_ms=0.0,
            unchecked="no node was run",
            notes=notes,
        )

    def _count_on_values(self, state: PreservedModel) -> None:
        """Count the work of nodes that need tensor values by running them, where the model has values."""
        devices = {tensor.device for tensor in self.graph.bound_model().parameters()}
        estimated = [found for found in self.classes.values() if found.estimate_reason]
        if estimated and len(devices) == 1 and (device := devices.pop()).type != "meta":
            ClassSurvey(self.flow, estimated, state).count_on_values(
                GraphWalk(self.graph, self.inputs, device), find_device(device)
            )

    def _calibrate(self, spec: DeviceSpec, device: Device, state: PreservedModel) -> tuple[DeviceSpec, str]:
        """Fit a description to the model's most expensive nodes, or to probe modules if it is on another device."""
        if self.other_device(device):
            return calibrate(spec, measure_probe_modules(device)), f"calibrated by probes on {device.describe()}"
        by_cost = sorted(self.classes.values(), key=lambda one: -len(one.members) * _estimated_ms(one, spec))
        chosen = by_cost[:CALIBRATED]
        run = TimingRounds(self, device, chosen, state)
        run.survey()
        for turn in range(run.least):
            run.round(turn)
        found = self._measurements(device, [one for one in chosen if not one.failure], run.times())
        note = f"calibrated by {len(found)} node classes on {device.describe()}"
        return calibrate(spec, _work_and_times(found)), note

    def _count_work(self, state: PreservedModel) -> None:
        walk = MetaWalk(self.graph, self.inputs)
        ClassSurvey(self.flow, list(self.classes.values()), state).count(walk)

    # ── measured ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def measure(self, device: Device, cache: ProfileCache, budget: TimeBudget) -> Profile:
        """Measure nodes; classes found in the cache are not measured again."""
        known = {sig: found for sig in self.classes if (found := cache.read(sig)) is not None}
        pending = [found for sig, found in self.classes.items() if sig not in known]
        with (
            retain_freed_memory(self._gradient_bytes() if pending and device.kind == "cpu" else ()),
            PreservedModel(self.graph.bound_model()) as state,
            mute_warnings(),
        ):
            run = TimingRounds(self, device, pending, state)
            self._run_rounds(run, budget)
            if any(one.failure or not one.counted for one in pending):
                self._count_work(state)
        fresh = self._measurements(device, pending, run.times())
        for signature, found in fresh.items():
            if found.source == MEASURED:
                cache.write(signature, found)
        notes = (f"{len(known)} of {len(self.classes)} classes read from the cache",) if known else ()
        self.report(1, 1, "done")
        return self._profile(
            device=device.describe(), mode=MEASURED, measurements={**known, **fresh}, steps=run.steps,
            step_ms=run.step_ms(), unchecked=run.unchecked, notes=(*notes, *run.notes),
        )  # fmt: skip

    def _gradient_bytes(self) -> list[int]:
        """Return the bytes of each parameter gradient on the CPU."""
        trained = [one for one in self.graph.bound_model().parameters() if one.requires_grad]
        return [one.nbytes for one in trained if one.device.type == "cpu"]

    def _run_rounds(self, run: TimingRounds, budget: TimeBudget) -> None:
        """Run a survey, then rounds until noise is low or the time budget is used."""
        if run.pending:
            self.report(0, self.rounds + 1, "survey")
            run.survey()
        turn = 0
        while turn < self.rounds or (turn < MOST_ROUNDS and run.steps and run.noise() > QUIET):
            if turn >= min(run.least, self.rounds) and not budget.allows_round(run.noise() > QUIET):
                break
            self.report(turn + 1, max(self.rounds, turn) + 1, f"round {turn + 1}")
            budget.begin_round()
            run.round(turn)
            budget.step_ms = min(run.steps, default=0.0)
            turn += 1

    def other_device(self, device: Device) -> str:
        """Return the model's device if it is not the profiled one, else an empty string."""
        parameters = self.graph.bound_model().parameters()
        return next((str(t.device) for t in parameters if is_on_other_device(t, device.torch_device)), "")

    def _measurements(
        self, device: Device, pending: list[NodeClass], times: dict[str, ClassTimes]
    ) -> dict[str, Measurement]:
        found = {
            one.signature: _measurement(one, times[one.signature])
            for one in pending
            if one.signature in times and not one.failure
        }
        failed = [one for one in pending if one.signature not in found]
        if failed:
            spec = calibrate(spec_like(device.kind, device.describe()), _work_and_times(found))
            found.update({one.signature: _estimate(one, spec, one.failure or "not reached") for one in failed})
        return found

    def _profile(
        self, *, device: str, mode: str, measurements: dict[str, Measurement], steps: list[float], step_ms: float,
        unchecked: str, notes: tuple[str, ...],
    ) -> Profile:  # fmt: skip
        nodes = self.graph.compute_nodes
        found = [measurements[self.signatures[node.id]] for node in nodes]
        is_host_bound = sum(one.host_ms for one in found) > sum(one.device_ms for one in found)
        assembly = CostAssembly(self.flow)
        times = step_times([self.signatures[node.id] for node in nodes], found)
        for node, measurement, ms in zip(nodes, found, times, strict=True):
            signature = self.signatures[node.id]
            assembly.add(node, signature, len(self.classes[signature].members), measurement, ms)
        total = sum(cost.ms for cost in assembly.costs)
        checked = Check(step_ms, total, summarize(steps).noise, len(steps)) if steps else None
        return Profile(
            self.graph.model_name, device, mode, tuple(assembly.costs), assembly.parameters_mb,
            tuple(assembly.values_mb), "host" if is_host_bound else "device", checked, unchecked, notes,
        )  # fmt: skip


def _estimated_ms(found: NodeClass, spec: DeviceSpec) -> float:
    return estimate_ms(found.forward_work, spec) + estimate_ms(found.backward_work, spec)


def _work_and_times(found: dict[str, Measurement]) -> list[tuple[KernelCounts, float]]:
    """Return pairs of work and time, forward and backward separately."""
    forward = [(one.forward_work, one.forward.ms) for one in found.values()]
    return forward + [(one.backward_work, one.backward.ms) for one in found.values()]


def _measurement(found: NodeClass, times: ClassTimes) -> Measurement:
    return Measurement(
        times.forward, times.backward, times.forward_host, times.backward_host,
        found.memory, found.forward_work, found.backward_work,
    )  # fmt: skip


def _estimate(found: NodeClass, spec: DeviceSpec, reason: str) -> Measurement:
    forward, backward = (estimate_ms(work, spec) for work in (found.forward_work, found.backward_work))
    why = f"{reason}; {found.estimate_reason}" if found.estimate_reason else reason
    empty = Reading()
    return Measurement(
        Reading(forward), Reading(backward), empty, empty,
        found.memory, found.forward_work, found.backward_work, ANALYTIC, why,
    )  # fmt: skip
