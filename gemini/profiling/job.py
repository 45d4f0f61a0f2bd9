"""The job: one run of the profiler, from classes of equal nodes to the costs of all nodes.

classes of equal nodes ──► cache ──► measured in rounds, or counted and estimated ──► costs of nodes
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from gemini.capture.binding import Call
from gemini.capture.graph import Graph
from gemini.profiling.analytic import calibrate, estimate_ms
from gemini.profiling.assembly import Assembly
from gemini.profiling.cache import Cache
from gemini.profiling.device import Device, Times, find_device
from gemini.profiling.flow import GradientFlow
from gemini.profiling.measurement import ANALYTIC, MEASURED, Measurement
from gemini.profiling.meta import MetaWalk
from gemini.profiling.overhead import overhead_of
from gemini.profiling.result import Check, Profile
from gemini.profiling.robust import Reading, summarize
from gemini.profiling.rounds import NodeClass, Rounds
from gemini.profiling.signature import class_of
from gemini.profiling.specs import DeviceSpec, spec_like
from gemini.profiling.step import Step
from gemini.profiling.unchanged import Unchanged
from gemini.profiling.walk import Walk
from gemini.profiling.work import Work

Progress = Callable[[int, int, str], None]
LEAST_ROUNDS, MOST_ROUNDS = 2, 6
CALIBRATED = 8  # classes of nodes that a description is fitted to
BUDGET = 8.0  # whole steps that profiling may take
QUIET = 0.03  # noise (of a class, weighted by time) below which no further round is worth its time


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
        with Unchanged(self.graph.bound_model()) as state, warnings.catch_warnings():
            warnings.simplefilter("ignore")
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
            step=None,
            unchecked="nothing was run",
            notes=notes,
        )

    def _looked_at(self, state: Unchanged) -> None:
        """Run the nodes that need contents, where the model has some, and count what they do."""
        homes = {tensor.device for tensor in self.graph.bound_model().parameters()}
        guessed = [found for found in self.classes.values() if found.guess]
        if guessed and len(homes) == 1 and (home := homes.pop()).type != "meta":
            run = Rounds(find_device(home), self.flow, guessed, state)
            run.look(Walk(self.graph, self.inputs, home))

    def _calibrated(self, spec: DeviceSpec, device: Device, state: Unchanged) -> tuple[DeviceSpec, str]:
        """The description, fitted to the dearest nodes of the model, or to probes where it cannot run on the device."""
        from gemini.profiling.probes import measure_probes

        if self._away(device):
            return calibrate(spec, measure_probes(device)), f"calibrated by probes on {device.describe()}"
        chosen = sorted(self.classes.values(), key=lambda one: -len(one.members) * _work_ms(one, spec))[:CALIBRATED]
        run = Rounds(device, self.flow, chosen, state)
        run.survey(Walk(self.graph, self.inputs, device.torch_device))
        run.time(Walk(self.graph, self.inputs, device.torch_device), 0)
        found = self._measurements(device, [one for one in chosen if one.times and not one.failure])
        return calibrate(spec, _pairs(found)), f"calibrated by {len(found)} classes of nodes on {device.describe()}"

    def _counted(self, state: Unchanged) -> None:
        walk = MetaWalk(self.graph, self.inputs)
        Rounds(_NO_DEVICE, self.flow, list(self.classes.values()), state).count(walk)

    # ── on a device ────────────────────────────────────────────────────────────────────────────────────────────
    def measured(self, device: Device, cache: Cache) -> Profile:
        """Measured nodes; classes that the cache knows are not measured again."""
        known = {sig: found for sig in self.classes if (found := cache.read(sig)) is not None}
        pending = [found for sig, found in self.classes.items() if sig not in known]
        with Unchanged(self.graph.bound_model()) as state, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            steps, unchecked = self._measure(device, pending, state)
        fresh = self._measurements(device, pending)
        for signature, found in fresh.items():
            if found.source == MEASURED:
                cache.write(signature, found)
        notes = (f"{len(known)} of {len(self.classes)} classes from the cache",) if known else ()
        return self._profile(
            device=device.describe(), mode=MEASURED, measurements={**known, **fresh}, step=summarize(steps),
            unchecked=unchecked, notes=notes,
        )  # fmt: skip

    def _measure(self, device: Device, pending: list[NodeClass], state: Unchanged) -> tuple[list[float], str]:
        """Run all rounds; the times of whole steps, or why there are none."""
        step, unchecked = self._step(device)
        run = Rounds(device, self.flow, pending, state)
        steps: list[float] = []
        budget = Budget(device)
        if pending:
            self.tell(0, self.rounds + 1, "survey")
            run.survey(Walk(self.graph, self.inputs, device.torch_device))
        if step is not None:
            budget.step_ms = step.run()  # not counted: the first step allocates and warms up
        turn = 0
        while turn < self.rounds or (turn < MOST_ROUNDS and pending and _noise(pending) > QUIET):
            if turn >= LEAST_ROUNDS and not budget.allows_round():
                break
            self.tell(turn + 1, max(self.rounds, turn) + 1, f"round {turn + 1}")
            budget.begin_round()
            if pending:
                run.time(Walk(self.graph, self.inputs, device.torch_device), turn)
            if step is not None:
                steps.append(step.run())
                budget.step_ms = min(budget.step_ms, steps[-1])
            turn += 1
        if any(not one.times for one in pending):
            self._counted(state)
        self.tell(1, 1, "done")
        return steps, unchecked

    def _step(self, device: Device) -> tuple[Step | None, str]:
        if not self.check:
            return None, "not asked for"
        away = self._away(device)
        if away:
            return None, f"the model is on {away}, not on {device.torch_device.type}"
        return Step(self.graph, device, self.inputs, self.call), ""

    def _away(self, device: Device) -> str:
        """Where the model is, if not on the device."""
        homes = {t.device.type for t in self.graph.bound_model().parameters()} - {device.torch_device.type}
        return homes.pop() if homes else ""

    def _measurements(self, device: Device, pending: list[NodeClass]) -> dict[str, Measurement]:
        overhead = overhead_of(device) if pending else Times(0.0, 0.0)
        found = {one.signature: _measurement(one, overhead) for one in pending if one.times and not one.failure}
        failed = [one for one in pending if one.signature not in found]
        if failed:
            spec = calibrate(spec_like(device.kind, device.describe()), _pairs(found))
            found.update({one.signature: _estimated(one, spec, one.failure or "not reached") for one in failed})
        return found

    def _profile(
        self, *, device: str, mode: str, measurements: dict[str, Measurement], step: Reading | None, unchecked: str,
        notes: tuple[str, ...],
    ) -> Profile:  # fmt: skip
        nodes = self.graph.compute_nodes
        found = [measurements[self.signatures[node.id]] for node in nodes]
        host = sum(m.forward_host.ms + m.backward_host.ms for m in found)
        limited_by_host = host > sum(m.forward.ms + m.backward.ms for m in found)
        assembly = Assembly(self.graph, limited_by_host)
        for node, measurement in zip(nodes, found, strict=True):
            signature = self.signatures[node.id]
            assembly.add(node, signature, len(self.classes[signature].members), measurement)
        total = sum(cost.ms for cost in assembly.costs)
        checked = Check(step.ms, total, step.noise, step.samples) if step is not None and step.samples else None
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


class Budget:
    """How long profiling may go on."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.begin = self.round = device.now_ms()
        self.step_ms = 0.0

    def begin_round(self) -> None:
        """A round starts."""
        self.round = self.device.now_ms()

    def allows_round(self) -> bool:
        """Whether one more like the last fits; always where no step was timed, as no limit is known."""
        now = self.device.now_ms()
        return not self.step_ms or now - self.begin + (now - self.round) <= BUDGET * self.step_ms


def _noise(classes: list[NodeClass]) -> float:
    """The noise of all classes, weighted by time."""
    total = weighted = 0.0
    for found in classes:
        reading = summarize([times.forward + times.backward for times in found.times])
        total += reading.ms * len(found.members)
        weighted += reading.ms * reading.noise * len(found.members)
    return weighted / total if total else 0.0


def _measurement(found: NodeClass, overhead: Times) -> Measurement:
    def reading(part: str) -> Reading:
        extra = getattr(overhead, part)
        return summarize([max(0.0, getattr(times, part) - extra) for times in found.times])

    return Measurement(
        reading("forward"),
        reading("backward"),
        reading("forward_host"),
        reading("backward_host"),
        found.memory,
        found.forward_work,
        found.backward_work,
    )


def _estimated(found: NodeClass, spec: DeviceSpec, reason: str) -> Measurement:
    forward, backward = (estimate_ms(work, spec) for work in (found.forward_work, found.backward_work))
    why = f"{reason}; {found.guess}" if found.guess else reason
    empty = Reading()
    return Measurement(
        Reading(forward), Reading(backward), empty, empty,
        found.memory, found.forward_work, found.backward_work, ANALYTIC, why,
    )  # fmt: skip


_NO_DEVICE: Any = None  # counting asks nothing of a device
