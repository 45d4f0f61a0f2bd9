"""The plan table of a model: the kinds of calls that it receives, and the plan of each."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.capture.hidden_size_reads import find_hidden_size_read
from gemini.capture.module_hooks import without_hooks
from gemini.errors import GeminiError, GenerateError, ScheduleError
from gemini.guards.model_version import ModelContents, read_contents
from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.encode import UnsupportedValueError
from gemini.planner.config_planner import Planner
from gemini.planner.microbatch_split import slice_call
from gemini.planner.plan_request import LOCAL
from gemini.planner.step_plan import ONE_MICRO_BATCH, UnplannableError
from gemini.runtime.call_outcome import FallbackReason, describe_failure, describe_planning_error
from gemini.runtime.deferred import OutputSpec
from gemini.runtime.deferred.hazard_mode import run_random_calls
from gemini.runtime.local_mode import run_locally
from gemini.runtime.pipelined.call_signature import (
    CallKind,
    KindMatch,
    differ_in_values,
    exact_key,
    kind_key,
    quick_key,
)
from gemini.runtime.pipelined.call_sizes import MOST_RESIZED, may_hold_sizes
from gemini.runtime.pipelined.loss_request import port_names
from gemini.runtime.pipelined.returned_attributes import ReturnedAttributes
from gemini.runtime.pool.worker_stats import measure_links, measure_speeds
from gemini.runtime.run_journal import ModelJournal
from gemini.snapshot.attribute_values import ContentsSnapshot
from gemini.snapshot.rng_snapshot import preserve_rng_state

if TYPE_CHECKING:
    from gemini.pipe.piped_model import Piped
    from gemini.planner.step_plan import ONE_MICRO_BATCH, StepPlan
    from gemini.runtime.eager.placed_model import PlacedModel
    from gemini.runtime.pipelined.step_request import ExecutedStep

_EARLY = 4  # kinds of training calls that are planned when they come
_KINDS = 16  # planned kinds of calls; beyond that, calls fall back to eager dispatch
_SHAPES = 64  # including those that share the plan of another
_EXACT = 64  # exact keys whose kinds are cached
_CHANGES = 8  # times that plans are made again for a model that the script changes
_FLEETING = 3  # kinds without a plan, or without a second call: then no more are planned
_NUMBERS = re.compile(r"\d+")  # sizes, in lines that are logged once
_FAILED = "planning failed: "
_CHOOSING = 0.25  # the share of planning that making a plan again takes
_LEAST_MS = 1000.0  # at least: the first plan may have come from the cache
_FORWARD = 1 / 3  # the share of a step
_SAID = 3  # plans that are logged, one line each: varying sizes make many
_WAYS = 3  # further branches on random numbers that are planned


class PlanTable:
    """Kinds of calls, planned as they come."""

    def __init__(
        self, managed: PlacedModel, planner: Planner, journal: ModelJournal, attributes: ReturnedAttributes
    ) -> None:
        self.managed, self.planner, self.journal, self.attributes = managed, planner, journal, attributes
        self.kinds: dict[Any, list[CallKind]] = {}
        self.has_edits = False  # stages of a compiled program were edited: they replace the model in this process too
        self.former: list[StepPlan] = []  # for former states of the model
        self.reported: StepPlan | None = None  # the one in the journal
        self.planning_ms = 0.0  # of all plans together
        self._planning_error: Exception | None = None  # of a failed planning
        self._plans_logged = 0  # number of plans that were logged
        self.on_first_step: Callable[[StepPlan], None] | None = None  # called after the first step by a plan
        self.on_step: Callable[[float], None] | None = None  # called after every step by a plan, with its milliseconds
        self.plans_at_once = True  # further kinds of calls, too; else once their calls would have repaid it
        self._calls: Counter[Any] = Counter()  # of kinds that are not planned yet

    def find(self, model: nn.Module, roster: ModelContents, call: ModelCall) -> tuple[CallKind, int | None]:
        """Return the kind of a call, and its samples where it has a plan; a new kind is planned."""
        state, exact = roster.state, exact_key(call)
        if state is not None and (known := state.found.get(exact)) is not None and known.is_valid():
            return known.kind, known.samples
        short = quick_key(call)
        found = state.kinds.get(short) if state is not None else None
        if found is None:
            found = self.kinds.get(kind_key(roster, call), [])
            if state is not None and found:
                state.kinds[short] = found
        found[:] = [kind for kind in found if not kind.is_stale]
        for kind in found:
            if kind.plan is None:
                return kind, None
            samples = kind.samples(call.tensors)
            if samples is None or not kind.plan.can_split(samples, self.managed.micro_batches):
                continue
            if self._may_vary_samples(model, kind, call, samples):
                if state is not None and exact is not None and len(state.found) < _EXACT:
                    state.found[exact] = KindMatch(kind, kind.plan, samples, found)
                return kind, samples
        if (resized := self._resize(model, found, call)) is not None:
            return resized, resized.samples(call.tensors)
        key = kind_key(roster, call)
        if reason := self._find_planning_limit(key) or self._find_unpaid(key, found):
            return CallKind(reason=reason), None
        known = [kind for kinds in self.kinds.values() for kind in kinds if kind.origin is None]
        planned = {id(kind.plan.partition) if kind.plan is not None else id(kind) for kind in known}
        if len(planned) >= _KINDS or len(known) >= _SHAPES:
            return CallKind(reason=f"it is called with more than {len(known)} signatures"), None
        earlier = (*(kind.plan for kind in found if kind.plan is not None), *self.former[::-1])
        made = self._make_plan(model, call, earlier_plans=earlier)
        made.is_training = torch.is_grad_enabled()
        if found:
            made.family = found[0].family
        self.kinds.setdefault(key, []).append(made)
        return made, None if made.plan is None else made.samples(call.tensors)

    def _may_vary_samples(self, model: nn.Module, kind: CallKind, call: ModelCall, samples: int) -> bool:
        """Return whether a plan serves another number of samples: the model's Python must not read it unseen."""
        root = kind.origin or kind
        plan = root.plan
        if plan is None or plan.single_micro_batch_reason or plan.graph.rolled or plan.graph.batch_size is None:
            return True
        if root.reads_samples is None and samples != plan.batch.size:
            part = slice_call(*call.with_tensors(call.tensors), plan.batch, 0, plan.graph.batch_size)
            with run_locally(), without_hooks(model), preserve_rng_state():
                root.reads_samples = find_hidden_size_read(plan.graph, model, part, of_samples=True)
        return samples == plan.batch.size or not root.reads_samples

    def _resize(self, model: nn.Module, found: list[CallKind], call: ModelCall) -> CallKind | None:
        """Return a kind for sizes that follow from those of planned calls; None where they need a plan of their own."""
        if len(found) < 2:
            return None
        with run_locally(), without_hooks(model), preserve_rng_state():
            made = found[0].family.find_plan(model, found, call, self.managed.micro_batches)
        if made is None:
            return None
        origin, plan = made
        kind = CallKind(plan, "", tuple(tuple(tensor.shape) for tensor in call.tensors), family=origin.family)
        kind.origin, kind.shares = origin, origin.shares
        resized = [one for one in found if one.origin is not None]
        if len(resized) >= MOST_RESIZED:
            found.remove(resized[0])
        found.append(kind)
        return kind

    def _find_unpaid(self, key: Any, found: list[CallKind]) -> str:
        """Return why a further kind of call is not planned yet: its calls so far would not have repaid that."""
        shown = self._reported_kind()
        if self.plans_at_once or shown is None or shown.plan is None:
            return ""
        if torch.is_grad_enabled() and self._is_early(found):
            return ""
        self._calls[key] += 1
        saved_ms = max(shown.plan.analysis.single_ms - shown.plan.step_ms, 0.0)
        if not torch.is_grad_enabled():
            saved_ms *= _FORWARD
        count = sum(kind.origin is None for kinds in self.kinds.values() for kind in kinds)
        cost_ms = max(self.planning_ms / max(count, 1), _LEAST_MS)
        return FallbackReason.UNPAID if self._calls[key] * saved_ms < cost_ms else ""

    def _is_early(self, found: list[CallKind]) -> bool:
        """Return whether a call of training is of one of the first kinds, or the second size of one: workers were
        requested for training, and two sizes make a plan for all others.
        """
        own = [kind for kind in found if kind.origin is None]
        if own:
            return len(own) == 1 and own[0].plan is not None
        return sum(any(kind.is_training for kind in kinds) for kinds in self.kinds.values()) < _EARLY

    def find_edited_stages(self, model: nn.Module, args: Any, kwargs: Any) -> Piped | None:
        """Return the stages of a compiled program that replace a model in its first call: those that were edited."""
        if not self.has_edits:
            return None
        plan = self.find(model, read_contents(model, None), ModelCall(args, kwargs))[0].plan
        return None if plan is None else plan.edited_in_process()

    def _find_planning_limit(self, key: Any) -> str:
        """Return why calls that differ from others in plain values only are not planned any more; '' where they are."""
        alike = [kind for other, kinds in self.kinds.items() if differ_in_values(other, key) for kind in kinds]
        hopeless = [kind for kind in alike if kind.plan is None]
        if len(hopeless) >= _FLEETING:
            return hopeless[-1].reason
        unused = [kind for kind in alike if kind.plan is not None and not kind.is_used]
        return FallbackReason.CHANGING_ARGUMENTS if len(unused) >= _FLEETING else ""

    def select_variant(self, model: nn.Module, kind: CallKind, samples: int, args: Any, kwargs: Any) -> CallKind | None:
        """Return the kind for the branches that random numbers select; None where it has no plan."""
        assert kind.plan is not None
        if kind.plan.branches is None:
            return kind
        run_random_calls()  # no draw may come before those of this call
        bound = bind(model, args, kwargs)
        found = kind.find_variant(model, bound, samples)
        if found is None and len(kind.variants) < _WAYS:
            reason = kind.plan.single_micro_batch_reason
            kind.variants.append(
                self._make_plan(model, ModelCall(args, kwargs), current_branch=True, single_micro_batch_reason=reason)
            )
            self.end_fallback(has_failed=False)
            found = kind.find_variant(model, bound, samples)
        if found is not None:
            found.adopt_output_spec((kind, *kind.variants), samples)
        return found

    def drop(self, kind: CallKind) -> bool:
        """Drop a plan after the script has changed the model; False where that happens too often."""
        if len(self.former) >= _CHANGES or kind.plan is None:
            return False
        root = kind.origin or kind
        if root.plan is not None:
            self.former.append(root.plan)
        for found in self.kinds.values():
            found[:] = [one for one in found if one is not root and one.origin is not root]
        return True

    def record_step(self, kind: CallKind, ran: ExecutedStep, step_ms: float, samples: int) -> None:
        """Record a step that ran by the plan of a kind."""
        if kind.plan is None:
            return
        if self.on_first_step is not None:
            on_first_step, self.on_first_step = self.on_first_step, None
            on_first_step(kind.plan)
        if self.on_step is not None:
            self.on_step(step_ms)
        if samples == kind.plan.batch.size:
            kind.timings.add(kind.plan, ran, step_ms, max(_CHOOSING * kind.planning_ms, _LEAST_MS))
        shown = kind if kind.plan is self.reported else self._reported_kind()
        if shown is None or kind.timings.count > shown.timings.count:  # most steps run by this one
            self._report(kind.plan)
            shown = kind
        if shown.family is kind.family:
            self.journal.record_time(step_ms)

    def describe_plan(self) -> str:
        """Describe the plan in the journal, with its present prediction; '' where there is none any more."""
        kind = self._reported_kind()
        return "" if kind is None or kind.plan is None else str(kind.timings.apply_to(kind.plan))

    def _reported_kind(self) -> CallKind | None:
        everyone = (one for kinds in self.kinds.values() for kind in kinds for one in (kind, kind.whole_batch))
        return next((one for one in everyone if one is not None and one.plan is self.reported), None)

    def replan(self, kind: CallKind, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Plan a kind again after steps have shown an imbalance, if that is worth it."""
        assert kind.plan is not None
        before, began = kind.timings.apply_to(kind.plan), time.perf_counter()
        kind.timings.is_due = False
        kind.changes += 1
        reads = self.managed.guards.reads.save(model)
        try:
            with run_locally(), without_hooks(model), preserve_rng_state():
                links = measure_links(self.managed.pool, LOCAL)
                plan = self.planner(model, args, kwargs, measured_plan=before, links=links)
            self._check(plan)
        except Exception:  # the present plan stays
            return
        finally:
            reads.restore()
        if plan is before:
            return
        if kind.plan is self.reported:
            self._report(plan)
        kind.change(plan)
        took = f"{before.step_ms:.0f} ms by the previous plan, replanned in {time.perf_counter() - began:.1f} s"
        self.managed.say(f"{self.managed.name}: {plan} ({took})")

    def find_whole_batch(self, kind: CallKind, model: nn.Module, call: ModelCall, reason: str) -> CallKind | None:
        """Return the kind for a loss that does not split: the whole batch in the loss, or in the whole step."""
        if kind.plan is None or kind.plan.single_micro_batch_reason or kind.plan.forms.own_statistics:
            return None
        if kind.plan.uses_host_rng:  # NumPy's random numbers are drawn ahead for micro-batches only
            return None
        tailed = kind.whole_batch is not None and kind.whole_batch.plan is not None and kind.whole_batch.plan.tail
        if kind.whole_batch is None or (tailed and kind.whole_batch.failures > 1):
            why = "single_micro_batch_reason" if tailed or kind.plan.tail is not None else "gather_reason"
            kind.whole_batch = self._make_plan(model, call, **{why: reason}, earlier_plans=(kind.plan,))
            self.end_fallback(has_failed=False)
        plan = kind.whole_batch.plan
        samples = None if plan is None else kind.whole_batch.samples(call.tensors)
        if plan is None or samples is None:
            return None
        bound = bind(model, *call.arguments())
        fits = plan.build().call_guard.find_mismatch(bound) is None
        goes = plan.branches is None or plan.branches.first_changed(model, bound, samples) is None
        return kind.whole_batch if fits and goes else None

    def learn_outputs(self, kind: CallKind, model: nn.Module, samples: int, output: Any) -> None:
        """Record the output spec of calls of a kind."""
        assert kind.plan is not None
        try:
            outline = OutputSpec.of(self.attributes.collect(kind.plan, model, output))
        except UnsupportedValueError as error:
            kind.plan, kind.reason = None, f"its output cannot be rebuilt: {error}"
            return
        if len(outline.metas) != len(kind.plan.graph.outputs()):
            kind.plan, kind.reason = None, FallbackReason.RETURNS_OTHER_TENSORS
            return
        kind.output_specs[samples] = outline
        kind.family.learn_outputs(kind.plan.graph, outline)

    def has_outputs(self, kind: CallKind, samples: int) -> bool:
        """Return whether the outputs of a call of this size are known, from a call of this or another size.

        The first call of a kind runs locally in any case: a model may keep what it has made for a size (a mask), and
        its graphs show it after that.
        """
        assert kind.plan is not None
        if samples not in kind.output_specs:
            has_run = kind.origin is not None or bool(kind.output_specs) or bool(kind.family.outputs)
            has_state = not has_run or may_hold_sizes(kind.plan)
            spec = None if has_state else kind.family.find_output_spec(kind.plan.graph, samples)
            if spec is None:
                return False
            kind.output_specs[samples] = spec
        return True

    def _make_plan(self, model: nn.Module, call: ModelCall, **changes: Any) -> CallKind:
        shapes = tuple(tuple(tensor.shape) for tensor in call.tensors)
        began = time.perf_counter()
        self.attributes.materialize(model)
        contents, reads = ContentsSnapshot(call.shared_arguments), self.managed.guards.reads.save(model)
        try:
            try:
                with run_locally(), without_hooks(model), preserve_rng_state():
                    probe = partial(measure_speeds, self.managed.pool)
                    links = measure_links(self.managed.pool, LOCAL)
                    plan = self.planner(model, *call.arguments(), measure_speeds=probe, links=links, **changes)
            finally:
                self.planning_ms += (time.perf_counter() - began) * 1e3
                changed, outside = contents.restore(), reads.restore()
            if changed:
                raise UnplannableError(f"it modifies its arguments: {changed}")
            if outside:
                raise UnplannableError(f"it modifies values outside the model: {outside}")
            self._check(plan)
        except ScheduleError:  # the requested schedule is impossible: the user must know
            raise
        except (UnplannableError, GeminiError) as error:
            if self.has_edits and isinstance(error, GenerateError):  # the edited code is no stage any more
                raise
            reason = describe_planning_error(error)
        except Exception as error:
            if self.has_edits:  # most likely an error of the edited code
                raise
            self._planning_error = error  # if the call itself fails too, it is an error of user code
            return CallKind(None, f"{_FAILED}{describe_failure(error)}", shapes)
        else:
            if not self.journal.plan:
                self._report(plan)
            if plan.unsharded_reason:
                text = f"{self.managed.name} runs in undivided stages: {plan.unsharded_reason}"
                self.managed.record.say(text, once=plan.unsharded_reason)
            if plan.single_micro_batch_reason and plan.single_micro_batch_reason != ONE_MICRO_BATCH:
                text = f"{self.managed.name} runs a batch as a single micro-batch: {plan.single_micro_batch_reason}"
                self.managed.record.say(text, once=plan.single_micro_batch_reason)
            self._log_plan(plan, f"planned in {time.perf_counter() - began:.1f} s")
            return CallKind(plan, "", shapes, planning_ms=(time.perf_counter() - began) * 1e3)
        self._log_unplanned(reason)
        return CallKind(None, reason, shapes)

    def _log_plan(self, plan: StepPlan, took: str) -> None:
        self._plans_logged += 1
        if self._plans_logged <= _SAID:
            rest = "; further plans are not logged" if self._plans_logged == _SAID else ""
            self.managed.say(f"{self.managed.name}: {plan} ({took}{rest})")

    def _report(self, plan: StepPlan) -> None:
        self.reported, self.journal.plan, self.journal.last_ms = plan, str(plan), []
        self.journal.describe_plan_by(self.describe_plan)

    def _log_unplanned(self, reason: str) -> None:
        self.managed.record.say(f"{self.managed.name} runs without a plan: {reason}", once=_NUMBERS.sub("", reason))

    def end_fallback(self, *, has_failed: bool) -> None:
        """Report a failed planning after the call has run in another way; if the call failed too, plan again later."""
        error, self._planning_error = self._planning_error, None
        if error is None:
            return
        if has_failed:
            for kinds in self.kinds.values():
                kinds[:] = [kind for kind in kinds if kind.plan is not None or not kind.reason.startswith(_FAILED)]
            return
        self.managed.record.demote(f"planning {self.managed.name}", error)
        self._log_unplanned(f"{_FAILED}{describe_failure(error)}")

    def _check(self, plan: Any) -> None:
        sources = [node for ref in plan.graph.outputs() if (node := plan.graph.nodes[ref.node]).is_source]
        if plan.writes_buffers and any(node.kind == "buffer" for node in sources):
            raise UnplannableError("it returns one of its buffers unchanged, and writes buffers")
        if plan.micro_batches < 2 and not plan.single_micro_batch_reason:
            raise UnplannableError("there is only one sample")
        port_names(plan)
