"""The overlapped path of one model.

    call of a new kind     made here or by dispatch; a plan is made for its like
    call of that kind      put off (`runtime.deferred`); nothing runs
    backward()             the recorded loss is looked at, and the whole step runs in the workers by the plan
                           (`runtime.executor`); where that cannot be, the call is made by dispatch

Whatever goes wrong here before a step is done, dispatch makes it again from the start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from gemini.batch_analysis.batch_kinds import SplittingError
from gemini.batch_analysis.loss_tape import Tape
from gemini.errors import GeminiError, WorkerError
from gemini.guards.active_modes import has_saved_tensor_hooks, is_checkpointed
from gemini.guards.model_version import ModelContents, ModelVersion, read_contents
from gemini.ir.autograd_modes import Region
from gemini.ir.call_binding import Call, bind
from gemini.ir.interpreter import GuardBroken
from gemini.planner.microbatch_sizes import piece_sizes
from gemini.random_numbers.host_rng import ForeignDraws
from gemini.runtime.deferred import Pending, StepResult, Work, defer, pending_queue, placed
from gemini.runtime.local_mode import run_locally
from gemini.runtime.pipelined.call_signature import Kind, Planner
from gemini.runtime.pipelined.evaluation_step import outputs_of, prepare_outputs, request_outputs
from gemini.runtime.pipelined.fallback_reason import of_failure
from gemini.runtime.pipelined.local_microbatches import in_pieces
from gemini.runtime.pipelined.loss_request import Prepared, check_numerically, prepare, request_of
from gemini.runtime.pipelined.plan_table import Catalogue
from gemini.runtime.pipelined.returned_attributes import Leavings, passed
from gemini.runtime.pipelined.stage_install import executor_for
from gemini.runtime.pipelined.step_generators import follow, states_for
from gemini.runtime.pipelined.step_request import StepResult as Ran
from gemini.runtime.pipelined.step_result import foresee, result_of
from gemini.runtime.pool.memory_peaks import read_peaks, reset_peaks
from gemini.runtime.pool.signals import DeferredSignals
from gemini.runtime.run_journal import DISPATCHED, LOCAL, OVERLAPPED, UNDIVIDED, Story
from gemini.snapshot.rng_snapshot import undrawn

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan
    from gemini.runtime.interception.managed_model import Managed
    from gemini.runtime.pipelined.step_executor import Executor

_FAILURES = 3  # steps of a kind that fail in the workers: then no more are tried
_ANOTHER_WAY = "a branch on random numbers goes a way for which there is no plan"
_EARLY = "what it returned was read, or given to another model, before there was a loss"
_TRACED = (3, 10)  # steps whose traces are saved: once warm, and once more
_SLOW = 10  # times what a step is expected to take: then it hangs


class _Asked(NamedTuple):
    """A call of the program."""

    model: nn.Module
    eager: Callable[[Any, Any], Any]
    call: Call
    args: Any
    kwargs: Any
    foreign: ForeignDraws | None = None


class Overlap:
    """Plans, and how calls come to run by them."""

    def __init__(self, managed: Managed, planner: Planner, story: Story, trace: Path | None = None) -> None:
        self.managed, self.story, self.trace = managed, story, trace
        self.verify: Callable[[Pending, int, StepResult], None] | None = None  # sees every step that ran by a plan
        self.steps = 0
        self._roster: ModelContents | None = None
        self._seen: ModelVersion | None = None  # of the model, when what its code reads was looked at
        self._leavings = Leavings()
        self.catalogue = Catalogue(managed, planner, story, self._leavings)

    def call(self, model: nn.Module, eager: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
        """A call of the model; `eager` makes it by dispatch, also where something here fails before it has."""
        has_begun = False

        def begun(given: Any, named: Any) -> Any:
            nonlocal has_begun
            has_begun = True
            return eager(given, named)

        try:
            return self._called(model, begun, args, kwargs)
        except GeminiError:
            raise
        except Exception as error:
            if has_begun:  # it may be the program's own
                raise
            self.managed.record.demote(f"a call of {self.managed.name}", error)
            return self._dispatched(eager, args, kwargs, of_failure(error))

    def _called(self, model: nn.Module, eager: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = placed(args, kwargs)
        self._roster = roster = read_contents(model, self._roster)
        if roster.state is None or roster.state is not self._seen:
            self._seen = roster.state
            self.managed.look(model)
            if reason := self.managed.methods.obstacle():  # from the next call on it does not come here
                with run_locally():
                    return self._dispatched(eager, args, kwargs, reason)
        if reason := _watched(roster) or roster.hooks() or self._outside():
            return self._dispatched(eager, args, kwargs, reason)
        call = Call(args, kwargs)
        if reason := _unsendable(call.tensors):
            return self._dispatched(eager, args, kwargs, reason)
        kind, samples = self.catalogue.find(model, roster, call)
        reason = kind.reason
        if not reason and samples is None:
            reason = "its inputs have other sizes than those it was planned for"
        if not reason:
            assert kind.plan is not None
            fitting = kind.plan.build(kind.shares)._fitting
            with self._leavings.aside(model):
                misfit = fitting.misfit(bind(model, args, kwargs), roster.state, call.like)
            if misfit is not None and misfit.kind == "model" and self.catalogue.drop(kind):
                return self._called(model, eager, args, kwargs)
            reason = "" if misfit is None else misfit.text
        if reason or samples is None:
            return self._dispatched(eager, args, kwargs, reason)
        going = self.catalogue.going(model, kind, samples, args, kwargs)
        if going is None:
            return self._dispatched(eager, args, kwargs, _ANOTHER_WAY)
        kind = going
        if kind.plan is not None and kind.plan.forms.own_statistics:
            if samples < 2 * kind.plan.micro_batches:
                return self._dispatched(eager, args, kwargs, "micro-batches of one sample have no statistics")
            eager = partial(in_pieces, kind.plan, model)
        if samples not in kind.outlines:
            output = self._dispatched(eager, args, kwargs, "the first call of its size shows what is returned")
            self.catalogue.learn(kind, model, samples, output)
            return output
        try:
            foreign = _drawn(kind, model, args, kwargs)
        except Exception as error:
            return self._dispatched(eager, args, kwargs, of_failure(error))
        if torch.is_grad_enabled():
            work = self._work(model, roster, kind, samples, eager)
            work = work if foreign is None else work.drawn(foreign)
            assert kind.plan is not None
            given = passed(kind.plan, model, args, kwargs)
            return self._leavings.give(kind.plan, model, defer(work, call, given, roster.state))
        return self._evaluated(_Asked(model, eager, call, args, kwargs, foreign), kind, samples)

    def _outside(self) -> str:
        """Why the code of the model cannot run in stages; '' where it can."""
        reason = self.managed.outside.obstacle()
        if reason and self.managed.outside.lasting():
            self.managed.record.say(f"{self.managed.name} runs without a plan: {reason}", once=reason)
        return reason

    def _dispatched(self, eager: Callable[[Any, Any], Any], args: Any, kwargs: Any, reason: str) -> Any:
        self.story.took(DISPATCHED if self.managed.units else LOCAL, reason)
        if self._roster is not None:
            self._leavings.settle(self._roster.model)
        has_failed = True
        try:
            output = eager(args, kwargs)
            has_failed = False
        finally:
            self.catalogue.made(has_failed=has_failed)
        return output

    def _work(
        self, model: nn.Module, roster: ModelContents, kind: Kind, samples: int, eager: Callable[[Any, Any], Any]
    ) -> Work:
        assert kind.plan is not None
        work = kind.works.get(samples)
        if work is None or work.modules is not roster.modules:  # what is trained is the same in all calls of a kind

            def overlapped(pending: Pending, tape: Tape, root: int) -> StepResult | None:
                result = self._run(kind, samples, pending, tape, root)
                if result is not None and self.verify is not None:
                    self.verify(pending, root, result)
                return result

            draws, writes = kind.plan.is_random, kind.plan.writes
            trained = [parameter for parameter in roster.parameters if parameter.requires_grad]
            work = Work(
                model, kind.outlines[samples], eager, overlapped, trained, draws, writes, partial(self._demoted, kind),
                self._forced, passed=frozenset(kind.plan.passed), modules=roster.modules,
                has_left=self._leavings.gave,
            )  # fmt: skip
            kind.works[samples] = work
        work.eager = self._leavings.apart(kind.plan, model, eager)
        return work

    def _forced(self) -> None:
        """The program has used what a call returned, and not for a loss alone."""
        self.story.took(DISPATCHED if self.managed.units else LOCAL, _EARLY)

    def _demoted(self, kind: Kind, error: Exception) -> None:
        """A step has failed and is made again by dispatch."""
        if not isinstance(error, GuardBroken):  # that is about this batch: its numbers go another way
            self._failed(error)
        kind.failures += 1
        if kind.failures >= _FAILURES:
            kind.plan, kind.reason = None, f"{kind.failures} steps have failed: {of_failure(error)}"
        self.story.took(DISPATCHED if self.managed.units else LOCAL, of_failure(error))

    def _failed(self, error: Exception) -> None:
        if isinstance(error, WorkerError):
            if not self.managed.record.survives:
                raise error
            self.managed.give_up(str(error))
            return
        self.managed.record.demote(f"a step of {self.managed.name}", error)

    # ── without gradients ──────────────────────────────────────────────────────────────────────────────────────────
    def _evaluated(self, asked: _Asked, kind: Kind, samples: int) -> Any:
        plan, outline = kind.plan, kind.outlines[samples]
        assert plan is not None
        sizes = piece_sizes(samples, plan.micro_batches)
        prepared = kind.prepared.get(samples)
        if prepared is None:
            prepared = kind.prepared[samples] = prepare_outputs(plan, outline.metas, sizes)
        if prepared.reason:
            with self._leavings.aside(asked.model):
                whole = self.catalogue.undivided_like(kind, asked.model, asked.call, prepared.reason)
            if whole is not None:
                counted = whole.samples(asked.call.tensors) or 1  # it may count them in another dimension
                whole.outlines[counted] = outline
                return self._evaluated(asked, whole, counted)
            with nullcontext() if asked.foreign is None else asked.foreign.as_then():
                return self._dispatched(asked.eager, asked.args, asked.kwargs, prepared.reason)
        bound = bind(asked.model, asked.args, asked.kwargs)
        pending_queue.let_pass(plan.is_random, plan.writes)
        try:
            with DeferredSignals(), self._leavings.aside(asked.model):
                self.managed.tell_dropped()
                executor = self._executor(kind, prepared)
                given = None if asked.foreign is None else asked.foreign.results
                request = request_outputs(kind, prepared, asked.call.tensors, bound, sizes, given)
                request.patience = _SLOW * plan.step_ms / 1e3
                request.generator = states_for(plan, self.managed)
                request.state = None if self._roster is None else self._roster.state
                ran = executor.run(request)
                found = outputs_of(prepared, ran.outputs, passed(plan, asked.model, asked.args, asked.kwargs))
        except Exception as error:
            if not isinstance(error, SplittingError):  # that is about this batch
                self._failed(error)
            with nullcontext() if asked.foreign is None else asked.foreign.as_then():
                return self._dispatched(asked.eager, asked.args, asked.kwargs, of_failure(error))
        follow(plan, self.managed, ran.generator)
        self._took(plan)
        return self._leavings.give(plan, asked.model, outline.build(found))

    # ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _run(self, kind: Kind, samples: int, pending: Pending, tape: Tape, root: int) -> StepResult | None:
        assert kind.plan is not None
        if kind.rehearsal.is_due:
            self._again(kind, pending)
        sizes = piece_sizes(samples, kind.plan.micro_batches)
        alive = pending.alive()
        key = (tape.signature(), root, tuple(alive), tuple(sizes))
        prepared = kind.prepared.get(key)
        if prepared is None:
            prepared = prepare(kind.plan, tape, root, alive, sizes)
            if not prepared.reason and not kind.plan.unsplit:
                try:
                    with self._leavings.aside(pending.work.model):
                        prepared = check_numerically(kind.plan, prepared, pending, tape, root)
                except SplittingError as error:  # another batch may be what the proof was about
                    return self._as_one(kind, pending, tape, root, str(error))
            kind.prepared[key] = prepared
        if prepared.reason:
            return self._as_one(kind, pending, tape, root, prepared.reason, of_batch=False)
        args, kwargs = pending.call.with_tensors(pending.inputs)
        bound = bind(kind.plan.graph.bound_model(), args, kwargs)
        with DeferredSignals(), self._leavings.aside(pending.work.model):
            self.managed.tell_dropped()
            executor = self._executor(kind, prepared)
            try:
                request, means = request_of(kind, prepared, pending, bound, sizes)
            except SplittingError as error:  # this batch is not what the proof was about
                return self._as_one(kind, pending, tape, root, str(error))
            request.patience = _SLOW * max(kind.plan.step_ms, kind.rehearsal.last_ms) / 1e3
            request.generator, request.state = states_for(kind.plan, self.managed), pending.standing
            request.foresee = None if self.verify is not None else partial(foresee, kind, pending, root)
            if self.trace is not None and self.steps + 1 in _TRACED:
                reset_peaks(self.managed.crew.workers)
            began = time.perf_counter()
            ran = executor.run(request)
        step_ms = (time.perf_counter() - began) * 1e3
        self._took(kind.plan)
        self.steps += 1
        self._trace(kind, ran, step_ms)
        self.catalogue.ran(kind, ran, step_ms, samples)
        follow(kind.plan, self.managed, ran.generator)
        return result_of(kind, prepared, pending, bound, ran, means)

    def _again(self, kind: Kind, pending: Pending) -> None:
        """Have the plan of a kind made again before a step."""
        on_cpu = all(worker.device.kind == "cpu" for worker in self.managed.crew.workers)
        if not kind.may_change or not on_cpu:
            kind.rehearsal.is_due = False
            return
        args, kwargs = pending.call.with_tensors(pending.inputs)
        with self._leavings.aside(pending.work.model), ExitStack() as stack:  # as it was when the call was made
            pending.region.enter(stack, Region.current())
            self.catalogue.plan_again(kind, pending.work.model, args, kwargs)

    def _as_one(
        self, kind: Kind, pending: Pending, tape: Tape, root: int, reason: str, *, of_batch: bool = True
    ) -> StepResult | None:
        """A step that does not split: by micro-batches up to a loss on the whole batch, else with the batch as one.

        None where that cannot be either. The user is told, unless the reason is `of_batch`, and another with the next.
        """
        args, kwargs = pending.call.with_tensors(pending.inputs)
        with self._leavings.aside(pending.work.model), ExitStack() as stack:  # as it was when the call was made
            pending.region.enter(stack, Region.current())
            whole = self.catalogue.undivided_like(kind, pending.work.model, Call(args, kwargs), reason)
        tailed = whole is not None and whole.plan is not None and whole.plan.tail is not None
        how = "goes forward with all micro-batches first" if tailed else "runs a batch as one"
        told = whole is not None and whole.plan is not None and whole.plan.unsplit  # when it was planned
        if not of_batch and not told:
            self.managed.record.say(f"{self.managed.name} {how}: {reason}", once=reason)
        if whole is not None:
            try:
                return self._run(whole, whole.samples(pending.inputs) or 1, pending, tape, root)
            except Exception:
                whole.failures += 1
                raise
        self.story.took(DISPATCHED, reason)
        return None

    def _took(self, plan: StepPlan) -> None:
        whole = f"all go forward first, the loss is of the whole batch: {plan.tail.reason}" if plan.tail else ""
        self.story.took(UNDIVIDED if plan.unsplit else OVERLAPPED, plan.unsplit or whole)

    def _executor(self, kind: Kind, prepared: Prepared) -> Executor:
        known = (one for kinds in self.catalogue.kinds.values() for one in kinds)
        return executor_for(kind, prepared, known, self.managed)

    def _trace(self, kind: Kind, ran: Ran, step_ms: float) -> None:
        if self.trace is None or kind.plan is None or self.steps not in _TRACED:
            return
        from gemini.runtime.pipelined.step_trace import trace_of

        with undrawn():
            peaks = read_peaks(self.managed.crew.workers)
            trace = trace_of(kind.rehearsal.expecting(kind.plan), ran.trace, step_ms, peaks)
            files = trace.save(self.trace / f"{self.managed.name}-{self.steps}")
        self.story.traces += [str(path) for path in files]


def _drawn(kind: Kind, model: nn.Module, args: Any, kwargs: Any) -> ForeignDraws | None:
    """What a call draws from Python's and NumPy's generators, now that it is made."""
    if kind.plan is None or not kind.plan.is_foreign:
        return None

    with run_locally(), torch.no_grad():
        return ForeignDraws(kind.plan.graph, model, bind(model, args, kwargs))


def _unsendable(tensors: list[torch.Tensor]) -> str:
    """Why steps with these inputs cannot run in stages; '' where they can."""
    for one in tensors:
        if type(one) not in (torch.Tensor, nn.Parameter):
            return f"it is given a tensor of class {type(one).__name__}"
        if one.is_nested or one.is_quantized or one.layout not in (torch.strided, torch.sparse_coo):
            return f"it is given a {'nested' if one.is_nested else 'quantized or compressed sparse'} tensor"
    return ""


def _watched(roster: ModelContents) -> str:
    """Why a call has to be made as it is made, and at once."""
    if roster.has_swapped():
        return "it is called with other parameters than its own"
    if is_checkpointed():
        return "a checkpoint of the program runs it again in backward"
    return "hooks of the program take the tensors that it saves for backward" if has_saved_tensor_hooks() else ""
