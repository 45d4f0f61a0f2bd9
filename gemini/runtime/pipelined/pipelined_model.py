"""The pipelined path of one model.

    call of a new kind     runs locally or by eager dispatch; a plan is made for its kind
    call of that kind      deferred (`gemini.runtime.deferred`); nothing runs
    backward()             the recorded loss is analysed, and the whole step runs in the workers by the plan
                           (`step_executor`); where that is impossible, the call falls back to eager dispatch

After any internal failure before a step is complete, eager dispatch runs it from the start.
"""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.atomic_files import unused_path
from gemini.batch_analysis.batch_kinds import SplittingError
from gemini.batch_analysis.loss_tape import Tape
from gemini.errors import GeminiError, WorkerError
from gemini.guards.model_version import ModelContents, ModelVersion, read_contents
from gemini.ir.autograd_modes import Region
from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.interpreter import GuardBroken
from gemini.planner.config_planner import Planner
from gemini.planner.microbatch_split import micro_batch_sizes
from gemini.planner.step_plan import ONE_MICRO_BATCH
from gemini.purity.proof import find_impure_argument
from gemini.random_numbers.host_rng import HostRandomResults
from gemini.runtime.call_outcome import (
    CallPath,
    Completed,
    Deferred,
    Eager,
    FallbackReason,
    Local,
    Outcome,
    describe_failure,
)
from gemini.runtime.deferred import PendingCall, StepResult, defer, materialize_arguments, pending_queue
from gemini.runtime.deferred.contract import flatten_output
from gemini.runtime.eager.microbatches import run_forward
from gemini.runtime.local_mode import run_locally
from gemini.runtime.memory.shared_layout import MisplacedTensor
from gemini.runtime.pipelined.call_obstacles import find_obstacle, find_unsendable
from gemini.runtime.pipelined.call_signature import CallKind
from gemini.runtime.pipelined.call_sizes import outline_of, sizes_of
from gemini.runtime.pipelined.evaluation_step import collect_outputs, prepare_outputs, request_outputs
from gemini.runtime.pipelined.loss_request import PreparedLoss, build_request, check_numerically, prepare
from gemini.runtime.pipelined.plan_record import RECORDED_STEPS, save_record
from gemini.runtime.pipelined.plan_table import PlanTable
from gemini.runtime.pipelined.planned_step import PlannedCall, PlannedEager, PlannedStep
from gemini.runtime.pipelined.returned_attributes import ReturnedAttributes, passthrough_tensors
from gemini.runtime.pipelined.stage_install import get_executor
from gemini.runtime.pipelined.step_generators import apply_rng_state, rng_states_for
from gemini.runtime.pipelined.step_request import ExecutedStep as Ran
from gemini.runtime.pipelined.step_result import announce_gradients, to_step_result
from gemini.runtime.pipelined.verification import PlanDiffersError, PublishedState, Verification
from gemini.runtime.pool.signals import DeferredSignals
from gemini.runtime.pool.worker_stats import read_peaks, reset_peaks
from gemini.runtime.run_journal import ModelJournal
from gemini.runtime.script_site import find_script_site
from gemini.snapshot.rng_snapshot import preserve_rng_state

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan
    from gemini.runtime.eager.placed_model import PlacedModel
    from gemini.runtime.pipelined.step_executor import Executor

_FAILURES = 3  # failed steps of a kind after which no more are tried
_TRACED = (3, 10)  # steps whose traces are saved
_SLOW = 10  # times the predicted duration: a hang


class PipelinedModel:
    """The plans of one model, and the steps that run by them."""

    def __init__(
        self,
        managed: PlacedModel,
        planner: Planner,
        journal: ModelJournal,
        trace: Path | None = None,
        *,
        verify: bool = False,
        record_path: Path | None = None,
    ) -> None:
        self.managed, self.trace, self.record_path = managed, trace, record_path
        self._peaks_mb: tuple[float, ...] = ()  # of the last recorded step
        self.journal = managed.journal = journal  # of calls by all paths
        self.steps = 0
        self._contents: ModelContents | None = None
        self._checked: ModelVersion | None = None  # the version of the model whose code was inspected last
        self.attributes = ReturnedAttributes()
        self.plans = PlanTable(managed, planner, journal, self.attributes)
        self.verification = Verification(self.plans, always=verify)

    def call(self, model: nn.Module, forward: Any, args: Any, kwargs: Any) -> Outcome:
        """Defer or run a call by a plan, or return why it takes a slower path; `fall_back` then runs it.

        `forward` is the model, or its forward where its hooks already run.
        """
        try:
            return self._call(model, forward, args, kwargs)
        except GeminiError:
            raise
        except Exception as error:
            self.managed.record.demote(f"a call of {self.managed.name}", error)
            return Eager(describe_failure(error), args, kwargs)

    def fall_back(self, outcome: Eager | Local, model: nn.Module, forward: Any) -> Any:
        """Run a call by eager dispatch."""
        self.record_fallback(outcome.reason, is_local=isinstance(outcome, Local))
        if self._contents is not None:
            self.attributes.materialize(self._contents.model)
        has_failed = True
        try:
            if isinstance(outcome, PlannedEager):
                output = outcome.run(model, forward)
            else:
                output = run_forward(model, forward, outcome.args, outcome.kwargs)
            has_failed = False
        finally:
            self.plans.end_fallback(has_failed=has_failed)
        if isinstance(outcome, PlannedEager) and outcome.shows is not None:
            kind, samples = outcome.shows
            self.plans.learn_outputs(kind, model, samples, output)
        return output

    def _call(self, model: nn.Module, forward: Any, args: Any, kwargs: Any) -> Outcome:
        began = time.perf_counter()
        args, kwargs = materialize_arguments(args, kwargs)
        self._contents = contents = read_contents(model, self._contents)
        if contents.state is None or contents.state is not self._checked:
            self._checked = contents.state
            self.managed.refresh_guards(model)
            if reason := self.managed.guards.patches.check(model):  # further calls do not reach this path
                return Local(reason, args, kwargs)
        if reason := find_obstacle(contents) or contents.hooks() or self._find_state_obstacle(model):
            return Eager(reason, args, kwargs)
        call = ModelCall(args, kwargs)
        if reason := find_unsendable(call.tensors) or find_impure_argument((args, kwargs), model):
            return Eager(reason, args, kwargs)
        kind, samples = self.plans.find(model, contents, call)
        reason = kind.reason
        if not reason and samples is None:
            reason = FallbackReason.OTHER_SIZES
        if not reason:
            assert kind.plan is not None
            guard = kind.plan.build(kind.shares).call_guard
            with self.attributes.hide(model):
                mismatch = guard.find_mismatch(bind(model, args, kwargs), contents.state, call.metadata_key)
            if mismatch is not None and mismatch.kind == "model" and self.plans.drop(kind):
                return self._call(model, forward, args, kwargs)
            reason = "" if mismatch is None else mismatch.text
        if reason or samples is None:
            return Eager(reason, args, kwargs)
        variant = self.plans.select_variant(model, kind, samples, args, kwargs)
        if variant is None or variant.plan is None:
            return Eager(FallbackReason.UNPLANNED_BRANCH, args, kwargs)
        kind, plan = variant, variant.plan
        if plan.forms.own_statistics and samples < 2 * plan.micro_batches:
            return Eager(FallbackReason.ONE_SAMPLE_STATISTICS, args, kwargs)
        if not self.plans.has_outputs(kind, samples):
            return PlannedEager(FallbackReason.FIRST_OF_SIZE, args, kwargs, plan=plan, shows=(kind, samples))
        try:
            host_draws = _draw_from_host(plan, model, args, kwargs)
        except Exception as error:
            return PlannedEager(describe_failure(error), args, kwargs, plan=plan)
        if not torch.is_grad_enabled():
            return self._evaluate(PlannedCall(model, call, args, kwargs, plan, forward, host_draws), kind, samples)
        step = self._step(model, contents, kind, plan, samples)
        step.plan, step.forward = plan, forward
        if host_draws is not None:
            step = replace(step, host_draws=host_draws)
        output = defer(step, call, passthrough_tensors(plan, model, args, kwargs), contents.state)
        if self.steps + 1 in RECORDED_STEPS:
            self.journal.record_site("forward", find_script_site(), (time.perf_counter() - began) * 1e3)
        return Deferred(self.attributes.assign(plan, model, output))

    def _find_state_obstacle(self, model: nn.Module) -> str:
        """Return why tensors or code of the model cannot be in stages; '' where they can."""
        tensors = itertools.chain(model.parameters(), model.buffers())
        reason = self.managed.shared_parameters.find_staying(tensors) or self.managed.guards.reads.check(model)
        if reason:
            self.managed.record.say(f"{self.managed.name} runs without a plan: {reason}", once=reason)
        return reason or ""

    def _step(
        self, model: nn.Module, contents: ModelContents, kind: CallKind, plan: StepPlan, samples: int
    ) -> PlannedStep:
        step = kind.steps.get(samples)
        if step is None or step.modules is not contents.modules:  # the same parameters train in all calls of a kind
            trained = [parameter for parameter in contents.parameters if parameter.requires_grad]
            step = kind.steps[samples] = PlannedStep(
                model=model, output_spec=kind.output_specs[samples], parameters=trained, draws=plan.uses_torch_rng,
                writes=plan.writes_buffers, passed=frozenset(plan.returned_sources), modules=contents.modules,
                pipelined=self, kind=kind, samples=samples, plan=plan, forward=model,
            )  # fmt: skip
        return step

    def record_fallback(self, reason: str, *, is_local: bool = False) -> None:
        """Record that a call runs by eager dispatch, or locally where no module is remote."""
        is_remote = self.managed.remote_modules and not self.managed.local_reason and not is_local
        self.journal.record(CallPath.EAGER if is_remote else CallPath.LOCAL, reason)

    def record_failure(self, kind: CallKind, error: Exception) -> None:
        """Record that a step has failed and falls back to eager dispatch."""
        if not isinstance(error, GuardBroken):  # a matter of this batch: its contents take another branch
            self._handle_error(error)
        kind.failures += 1
        if kind.origin is not None and not isinstance(error, GuardBroken):
            kind.family.is_fixed, kind.plan = True, None  # from now on every size has a plan of its own
        elif kind.failures >= _FAILURES:
            kind.plan, kind.reason = None, f"{kind.failures} steps have failed: {describe_failure(error)}"
        self.record_fallback(_describe(error))

    def _handle_error(self, error: Exception) -> None:
        if isinstance(error, PlanDiffersError):
            self.managed.give_up(str(error))
            return
        if isinstance(error, WorkerError):
            if not self.managed.record.survives:
                raise error
            self.managed.give_up(str(error))
            return
        self.managed.record.demote(f"a step of {self.managed.name}", error)

    # ── without gradients ──────────────────────────────────────────────────────────────────────────────────────────
    def _evaluate(self, given: PlannedCall, kind: CallKind, samples: int) -> Outcome:
        plan, output_spec = kind.plan, kind.output_specs[samples]
        assert plan is not None
        sizes = micro_batch_sizes(samples, plan.micro_batches)
        prepared = kind.prepared.get(samples)
        if prepared is None:
            prepared = kind.prepared[samples] = prepare_outputs(plan, output_spec.metas, sizes)
        if prepared.reason:
            with self.attributes.hide(given.model):
                whole = self.plans.find_whole_batch(kind, given.model, given.call, prepared.reason)
            if whole is None:
                return given.fall_back(prepared.reason)
            counted = whole.samples(given.call.tensors) or 1  # it may count them in another dimension
            whole.output_specs[counted] = output_spec
            return self._evaluate(given, whole, counted)
        bound = bind(given.model, given.args, given.kwargs)
        pending_queue.run_earlier_calls(plan.uses_torch_rng, plan.writes_buffers)
        before = PublishedState(given.model) if self.verification.is_due(kind, prepared) else None
        try:
            with DeferredSignals(), self.attributes.hide(given.model):
                self.managed.release_dropped()
                executor = self._executor(kind, prepared)
                host_draws = None if given.host_draws is None else given.host_draws.results
                request = request_outputs(kind, prepared, given.call.tensors, bound, sizes, host_draws)
                request.timeout = _SLOW * plan.step_ms / 1e3
                request.generator = rng_states_for(plan, self.managed)
                request.state = None if self._contents is None else self._contents.state
                began = time.perf_counter()
                ran = executor.run(request)
                self.verification.worked_ms += (time.perf_counter() - began) * 1e3
                found = collect_outputs(
                    prepared, ran.outputs, passthrough_tensors(plan, given.model, given.args, given.kwargs)
                )
            apply_rng_state(plan, self.managed, ran.generator)
            if before is not None:
                rerun = partial(self._rerun_outputs, given, kind, samples)
                self.verification.check_outputs(kind, prepared, found, before, rerun)
        except Exception as error:
            if not isinstance(error, (SplittingError, MisplacedTensor)):  # these concern the batch, or are logged
                self._handle_error(error)
            return given.fall_back(_describe(error))
        self._record_step(plan)
        return Completed(self.attributes.assign(plan, given.model, output_spec.build(found)))

    def _rerun_outputs(self, given: PlannedCall, kind: CallKind, samples: int) -> list[torch.Tensor]:
        """Run a call without gradients in this process; return the tensors of its output."""
        assert self._contents is not None
        step = self._step(given.model, self._contents, kind, given.plan, samples)
        step = replace(step, plan=given.plan, forward=given.forward, host_draws=given.host_draws)
        return flatten_output(step.run_again(given.args, given.kwargs))[1]

    # ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def run_step(self, kind: CallKind, samples: int, pending: PendingCall, tape: Tape, root: int) -> StepResult | Eager:
        """Run call, tape and backward by the plan of a kind; `Eager` where the step cannot run so."""
        assert kind.plan is not None
        if kind.timings.is_due:
            self._replan(kind, pending)
        sizes = micro_batch_sizes(samples, kind.plan.micro_batches)
        alive = pending.alive()
        key = (tape.signature(), root, tuple(alive), tuple(sizes))
        prepared = kind.prepared.get(key)
        if prepared is None:
            prepared = prepare(kind.plan, tape, root, alive, sizes)
            loss, shapes = outline_of(tape, root), sizes_of(pending.inputs)
            if kind.family.is_audited(loss, shapes):
                kind.verified[id(prepared)] = 1
            elif not prepared.reason and not kind.plan.single_micro_batch_reason:
                try:
                    with self.attributes.hide(pending.runner.model):
                        prepared = check_numerically(kind.plan, prepared, pending, tape, root)
                    kind.family.add_audited(loss, shapes)
                except SplittingError as error:  # another batch may satisfy the assumptions
                    return self._run_whole_batch(kind, pending, tape, root, str(error))
            kind.prepared[key] = prepared
        if prepared.reason:
            return self._run_whole_batch(kind, pending, tape, root, prepared.reason, of_batch=False)
        args, kwargs = pending.call.with_tensors(pending.inputs)
        bound = bind(kind.plan.graph.bound_model(), args, kwargs)
        with DeferredSignals(), self.attributes.hide(pending.runner.model):
            self.managed.release_dropped()
            executor = self._executor(kind, prepared)
            try:
                request, means = build_request(kind, prepared, pending, bound, sizes)
            except SplittingError as error:  # this batch violates an assumption of the proof
                return self._run_whole_batch(kind, pending, tape, root, str(error))
            request.timeout = _SLOW * max(kind.plan.step_ms, kind.timings.last_ms) / 1e3
            request.generator, request.state = rng_states_for(kind.plan, self.managed), pending.model_state
            is_verified = self.verification.is_due(kind, prepared)
            request.announce = None if is_verified else partial(announce_gradients, kind, pending, root)
            if self.steps + 1 in RECORDED_STEPS:
                reset_peaks(self.managed.pool.workers)
            began = time.perf_counter()
            ran = executor.run(request)
        step_ms = (time.perf_counter() - began) * 1e3
        self.verification.worked_ms += step_ms
        apply_rng_state(kind.plan, self.managed, ran.generator)
        result = to_step_result(kind, prepared, pending, bound, ran, means)
        if is_verified:
            self.verification.check_step(kind, prepared, pending, root, result)
        self._record_step(kind.plan)
        self.steps += 1
        self._trace(kind, ran, step_ms)
        self.plans.record_step(kind, ran, step_ms, samples)
        self.journal.history.record_loss(result.root)
        self.journal.record_sizes(sizes_of(pending.inputs))
        self._save_record(kind, ran, step_ms)
        self.journal.observe_step(ran.trace, kind.plan.nworkers, self._peaks_mb)
        return result

    def _replan(self, kind: CallKind, pending: PendingCall) -> None:
        """Make the plan of a kind again before a step."""
        on_cpu = all(worker.device.kind == "cpu" for worker in self.managed.pool.workers)
        if not kind.may_change or not on_cpu:
            kind.timings.is_due = False
            return
        args, kwargs = pending.call.with_tensors(pending.inputs)
        with self.attributes.hide(pending.runner.model), ExitStack() as stack:  # as at the call
            pending.region.enter(stack, Region.current())
            self.plans.replan(kind, pending.runner.model, args, kwargs)

    def _run_whole_batch(
        self, kind: CallKind, pending: PendingCall, tape: Tape, root: int, reason: str, *, of_batch: bool = True
    ) -> StepResult | Eager:
        """Run a step that does not split: by micro-batches up to a loss on the whole batch, else as one micro-batch.

        `Eager` where that is impossible too. Logs the reason, unless it concerns this batch only (`of_batch`).
        """
        args, kwargs = pending.call.with_tensors(pending.inputs)
        with self.attributes.hide(pending.runner.model), ExitStack() as stack:  # as at the call
            pending.region.enter(stack, Region.current())
            whole = self.plans.find_whole_batch(kind, pending.runner.model, ModelCall(args, kwargs), reason)
        plan = None if whole is None else whole.plan
        is_tailed = plan is not None and plan.tail is not None
        is_logged = plan is not None and plan.single_micro_batch_reason  # when it was planned
        if not of_batch and not is_logged:
            path = (
                "runs the forward of all micro-batches before the loss" if is_tailed else "falls back to eager dispatch"
            )
            self.managed.record.say(f"{self.managed.name} {path}: {reason}", once=reason)
        if whole is not None:
            try:
                return self.run_step(whole, whole.samples(pending.inputs) or 1, pending, tape, root)
            except Exception:
                whole.failures += 1
                raise
        return Eager(reason)

    def _record_step(self, plan: StepPlan) -> None:
        whole = (
            f"all micro-batches run forward first, the loss is computed on the whole batch: {plan.tail.reason}"
            if plan.tail
            else ""
        )
        single = plan.single_micro_batch_reason
        if single == ONE_MICRO_BATCH and plan.shards is not None:
            single = ""  # shards work at the same time without micro-batches
        self.journal.record(CallPath.SINGLE_MICROBATCH if single else CallPath.OVERLAPPED, single or whole)

    def _executor(self, kind: CallKind, prepared: PreparedLoss) -> Executor:
        known = (one for kinds in self.plans.kinds.values() for one in kinds)
        return get_executor(kind, prepared, known, self.managed)

    def _trace(self, kind: CallKind, ran: Ran, step_ms: float) -> None:
        if self.steps in RECORDED_STEPS:
            self._peaks_mb = read_peaks(self.managed.pool.workers)
        if self.trace is None or kind.plan is None or self.steps not in _TRACED:
            return
        from gemini.runtime.pipelined.step_trace import build_trace

        with preserve_rng_state():
            trace = build_trace(kind.timings.apply_to(kind.plan), ran.trace, step_ms, self._peaks_mb)
            files = trace.save(unused_path(self.trace, f"{self.managed.name}-{self.steps}-"))
        self.journal.traces += [str(path) for path in files]

    def _save_record(self, kind: CallKind, ran: Ran, step_ms: float) -> None:
        """Write the plan and its measured steps for `gemini report`."""
        if self.record_path is None or kind.plan is None or self.steps not in RECORDED_STEPS:
            return
        self.journal.record_site("backward", find_script_site(), step_ms)
        steps = kind.timings.recent_steps() or [(ran.trace, step_ms)]
        try:
            plan = kind.timings.apply_to(kind.plan)
            save_record(self.record_path, plan, steps, self.steps, self._peaks_mb)
        except (OSError, GeminiError):  # a full disk must not fail the run; the journal logs that it cannot be written
            return
        self.journal.record_file = f"{self.record_path.parent.name}/{self.record_path.name}"


def _describe(error: Exception) -> str:
    """Return why a step has failed; a difference found by verification in its own words."""
    return str(error) if isinstance(error, PlanDiffersError) else describe_failure(error)


def _draw_from_host(plan: StepPlan, model: nn.Module, args: Any, kwargs: Any) -> HostRandomResults | None:
    """Draw the random numbers that a call takes from Python's and NumPy's generators."""
    if not plan.uses_host_rng:
        return None
    with run_locally(), torch.no_grad():
        return HostRandomResults(plan.graph, model, bind(model, args, kwargs))
