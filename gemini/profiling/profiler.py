"""The job: one run of the profiler, from classes of equal nodes to the costs of all nodes.

classes of equal nodes ──► cache ──► measured in rounds, or counted and estimated ──► costs of nodes
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gemini.ir.call_binding import Call
from gemini.ir.graph import Graph
from gemini.malloc import freed_memory_kept
from gemini.profiling.class_measurement import ANALYTIC, MEASURED, Measurement
from gemini.profiling.cost_assembly import Assembly
from gemini.profiling.cost_signature import class_of
from gemini.profiling.device_specs import DeviceSpec, spec_like
from gemini.profiling.flop_count import Work
from gemini.profiling.gradient_flow import GradientFlow
from gemini.profiling.graph_walk import Walk
from gemini.profiling.host_time import step_times
from gemini.profiling.measured_device import Device, find_device, is_elsewhere
from gemini.profiling.meta_run import MetaWalk
from gemini.profiling.node_classes import NodeClass, Survey
from gemini.profiling.preserved_model import Unchanged
from gemini.profiling.profile_cache import Cache
from gemini.profiling.profile_result import Check, Profile
from gemini.profiling.reading_statistics import ClassTimes, Reading, summarize
from gemini.profiling.roofline import calibrate, estimate_ms
from gemini.profiling.timing_rounds import Budget, Rounds
from gemini.quiet_warnings import muted

Progress = Callable[[int, int, str], None]
MOST_ROUNDS = 20  # where a step takes next to nothing; else the budget ends them sooner
CALIBRATED = 8  # classes of nodes that a description is fitted to
QUIET = 0.02  # noise (of a class, weighted by time) below which no further round is worth its time


class Profiling:
    """One run of the profiler."""

    def __init__(
        self,
        *,
        graph: Graph,
        inputs: dict[int, torch.Tensor],
        call: Call | None,
        rounds: int,
        check: bool,
        tell: Progress,
    ) -> None:
        self.graph, self.inputs, self.call, self.tell = graph, inputs, call, tell
        self.rounds, self.check = rounds, check
        self.flow = GradientFlow(graph)
        self.signatures = {node.id: class_of(graph, node, self.flow) for node in graph.compute_nodes}
        self.classes: dict[str, NodeClass] = {}
        for member, signature in self.signatures.items():
            self.classes.setdefault(signature, NodeClass(signature)).members.append(member)

    # ── without a device ───────────────────────────────────────────────────────────────────────────────────────
    def analytic(self, spec: DeviceSpec, device: Device | None) -> Profile:
        """Counted work on a described device."""
        self.tell(0, 1, "counting work")
        notes: tuple[str, ...] = ()
        with Unchanged(self.graph.bound_model()) as state, muted():
            self._counted(state)
            self._looked_at(state)
            if device is not None:
                spec, note = self._calibrated(spec, device, state)
                notes = (note,)
        measurements = {
            found.signature: _estimated(found, spec, f"analytic: {spec.name}") for found in self.classes.values()
        }
        self.tell(1, 1, "done")
        return self._profile(
            device=spec.name,
            mode=ANALYTIC,
            measurements=measurements,
            steps=[],
            step_ms=0.0,
            unchecked="nothing was run",
            notes=notes,
        )

    def _looked_at(self, state: Unchanged) -> None:
        """Run the nodes that need contents, where the model has some, and count what they do."""
        homes = {tensor.device for tensor in self.graph.bound_model().parameters()}
        guessed = [found for found in self.classes.values() if found.guess]
        if guessed and len(homes) == 1 and (home := homes.pop()).type != "meta":
            Survey(self.flow, guessed, state).look(Walk(self.graph, self.inputs, home), find_device(home))

    def _calibrated(self, spec: DeviceSpec, device: Device, state: Unchanged) -> tuple[DeviceSpec, str]:
        """The description, fitted to the dearest nodes of the model, or to probes where it cannot run on the device."""
        from gemini.profiling.roofline import measure_probes

        if self.away(device):
            return calibrate(spec, measure_probes(device)), f"calibrated by probes on {device.describe()}"
        chosen = sorted(self.classes.values(), key=lambda one: -len(one.members) * _work_ms(one, spec))[:CALIBRATED]
        run = Rounds(self, device, chosen, state)
        run.survey()
        for turn in range(run.least):
            run.round(turn)
        found = self._measurements(device, [one for one in chosen if not one.failure], run.times())
        return calibrate(spec, _pairs(found)), f"calibrated by {len(found)} classes of nodes on {device.describe()}"

    def _counted(self, state: Unchanged) -> None:
        walk = MetaWalk(self.graph, self.inputs)
        Survey(self.flow, list(self.classes.values()), state).count(walk)

    # ── on a device ────────────────────────────────────────────────────────────────────────────────────────────
    def measured(self, device: Device, cache: Cache, budget: Budget) -> Profile:
        """Measured nodes; classes that the cache knows are not measured again."""
        known = {sig: found for sig in self.classes if (found := cache.read(sig)) is not None}
        pending = [found for sig, found in self.classes.items() if sig not in known]
        with (
            freed_memory_kept(self._gradients() if pending and device.kind == "cpu" else ()),
            Unchanged(self.graph.bound_model()) as state,
            muted(),
        ):
            run = Rounds(self, device, pending, state)
            self._rounds(run, budget)
            if any(one.failure or not one.counted for one in pending):
                self._counted(state)
        fresh = self._measurements(device, pending, run.times())
        for signature, found in fresh.items():
            if found.source == MEASURED:
                cache.write(signature, found)
        notes = (f"{len(known)} of {len(self.classes)} classes from the cache",) if known else ()
        self.tell(1, 1, "done")
        return self._profile(
            device=device.describe(), mode=MEASURED, measurements={**known, **fresh}, steps=run.steps,
            step_ms=run.step_ms(), unchecked=run.unchecked, notes=(*notes, *run.notes),
        )  # fmt: skip

    def _gradients(self) -> list[int]:
        """Bytes of the gradients of a step on the CPU."""
        trained = [one for one in self.graph.bound_model().parameters() if one.requires_grad]
        return [one.nbytes for one in trained if one.device.type == "cpu"]

    def _rounds(self, run: Rounds, budget: Budget) -> None:
        """A survey; then rounds, as many as noise asks for and time allows."""
        if run.pending:
            self.tell(0, self.rounds + 1, "survey")
            run.survey()
        turn = 0
        while turn < self.rounds or (turn < MOST_ROUNDS and run.steps and run.noise() > QUIET):
            if turn >= min(run.least, self.rounds) and not budget.allows_round(run.noise() > QUIET):
                break
            self.tell(turn + 1, max(self.rounds, turn) + 1, f"round {turn + 1}")
            budget.begin_round()
            run.round(turn)
            budget.step_ms = min(run.steps, default=0.0)
            turn += 1

    def away(self, device: Device) -> str:
        """Where the model is, if not on the device."""
        parameters = self.graph.bound_model().parameters()
        return next((str(t.device) for t in parameters if is_elsewhere(t, device.torch_device)), "")

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
            spec = calibrate(spec_like(device.kind, device.describe()), _pairs(found))
            found.update({one.signature: _estimated(one, spec, one.failure or "not reached") for one in failed})
        return found

    def _profile(
        self, *, device: str, mode: str, measurements: dict[str, Measurement], steps: list[float], step_ms: float,
        unchecked: str, notes: tuple[str, ...],
    ) -> Profile:  # fmt: skip
        nodes = self.graph.compute_nodes
        found = [measurements[self.signatures[node.id]] for node in nodes]
        limited_by_host = sum(one.host_ms for one in found) > sum(one.device_ms for one in found)
        assembly = Assembly(self.flow)
        times = step_times([self.signatures[node.id] for node in nodes], found)
        for node, measurement, ms in zip(nodes, found, times, strict=True):
            signature = self.signatures[node.id]
            assembly.add(node, signature, len(self.classes[signature].members), measurement, ms)
        total = sum(cost.ms for cost in assembly.costs)
        checked = Check(step_ms, total, summarize(steps).noise, len(steps)) if steps else None
        return Profile(
            self.graph.model_name, device, mode, tuple(assembly.costs), assembly.parameters_mb,
            tuple(assembly.values_mb), "host" if limited_by_host else "device", checked, unchecked, notes,
        )  # fmt: skip


def _work_ms(found: NodeClass, spec: DeviceSpec) -> float:
    return estimate_ms(found.forward_work, spec) + estimate_ms(found.backward_work, spec)


def _pairs(found: dict[str, Measurement]) -> list[tuple[Work, float]]:
    """Work and its time, forward and backward apart."""
    forward = [(one.forward_work, one.forward.ms) for one in found.values()]
    return forward + [(one.backward_work, one.backward.ms) for one in found.values()]


def _measurement(found: NodeClass, times: ClassTimes) -> Measurement:
    return Measurement(
        times.forward, times.backward, times.forward_host, times.backward_host,
        found.memory, found.forward_work, found.backward_work,
    )  # fmt: skip


def _estimated(found: NodeClass, spec: DeviceSpec, reason: str) -> Measurement:
    forward, backward = (estimate_ms(work, spec) for work in (found.forward_work, found.backward_work))
    why = f"{reason}; {found.guess}" if found.guess else reason
    empty = Reading()
    return Measurement(
        Reading(forward), Reading(backward), empty, empty,
        found.memory, found.forward_work, found.backward_work, ANALYTIC, why,
    )  # fmt: skip
