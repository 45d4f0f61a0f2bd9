"""Kind interpreter: propagates batch kinds through analysis steps, in order, by the rules of their ops.

A step may demand another kind of an earlier result (two means with different weights are added: both must become sums
first); the decision is recorded, and interpretation restarts at the earlier step. There are five decisions, each of
which assigns the step a weight:

| decision | the result was                          | it becomes                     | by the weight    |
|----------|-----------------------------------------|--------------------------------|------------------|
| share    | a mean                                  | a sum                          | of the mean      |
| times    | a sum                                   | a mean of micro-batches        | M                |
| once     | replicated                              | a sum                          | 1 / M            |
| whole    | anything that is known before the step  | replicated                     | the whole value  |
| part     | the same, of a size that grows with it  | sharded                        | its part of it   |
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gemini.batch_analysis.analysis_steps import (
    AnalysisStep,
    InheritedRefusal,
    check_against_sizes,
    expand_kinds,
    form_refs,
    refuse_scattered_random_numbers,
)
from gemini.batch_analysis.assumptions import Condition
from gemini.batch_analysis.batch_kinds import Kind, Opaque, Partial, PerMicroBatch, Replicate, Shard, WeightedPartial
from gemini.batch_analysis.inplace import forget_aliases, is_known_after_writes, overwrite, write
from gemini.batch_analysis.microbatch_weights import (
    CountWeight,
    PartValue,
    UniformWeight,
    Weight,
    WholeValue,
    WrittenValue,
)
from gemini.batch_analysis.op_call import (
    REPEATING,
    AnalysisRefused,
    DecisionDemand,
    OpCall,
    ResultMeta,
    RowIndexDecision,
    SampleCount,
    TensorValue,
    UnknownNumber,
    leaves,
    repeats,
)
from gemini.batch_analysis.precompute import is_divisible, split_results
from gemini.batch_analysis.rolled_graphs import kind_of_role, refuse_per_micro_batch
from gemini.batch_analysis.rules.expert_rows import sorted_rows_kind, uses_sorted_rows
from gemini.batch_analysis.rules.registry import COUNTING, find_rule
from gemini.ir.encode import decode

_BUGS = (TypeError, ValueError, IndexError, KeyError, AttributeError, ZeroDivisionError, StopIteration)


@dataclass
class KindInterpreter:
    """The kinds of all values so far, and the decisions that led to them."""

    key: Callable[[Any], Hashable] = lambda ref: ref
    statements: list[AnalysisStep] = field(default_factory=list)
    values: dict[Hashable, TensorValue] = field(default_factory=dict)
    origin: dict[Hashable, int] = field(default_factory=dict)  # position of the step that made a value
    decisions: dict[Hashable, Any] = field(default_factory=dict)
    shares: dict[Hashable, Weight] = field(default_factory=dict)
    sizes: dict[Hashable, dict[tuple[int, ...], int]] = field(default_factory=dict)
    assumed: dict[Hashable, set[Hashable]] = field(default_factory=dict)  # see `Call.assumed`
    conditions: dict[Hashable, list[Condition]] = field(default_factory=dict)  # by step
    pointers: dict[Hashable, int] = field(default_factory=dict)  # row indices → rows per sample
    precomputable: set[int] = field(default_factory=set)  # nodes that can be computed before a step
    frozen: bool = False  # nothing may be weighted
    is_rolled: bool = False  # the Python of the graph loops over samples
    least: int = 1  # fewest samples of a micro-batch
    micro_batch_statistics: bool = False  # batch normalization may use statistics per micro-batch
    has_overwrites: bool = False  # an in-place write changed the kind of a value
    forgets: bool = False  # a write in a tape made earlier values unknown
    mixes: bool = False  # operands of a tape share memory as different types
    alias: dict[Hashable, Hashable] = field(default_factory=dict)  # values of the tape → values of the graph
    blocked: str = ""  # why nothing may be split
    blockers: dict[Hashable, str] = field(default_factory=dict)  # the steps that cause it

    def copy(self) -> KindInterpreter:
        """Return an independent copy."""
        copies: dict[str, Any] = {
            name: type(value)(value) for name, value in vars(self).items() if isinstance(value, (dict, list, set))
        }
        return replace(self, **copies)

    def block(self, statement: AnalysisStep, reason: str) -> None:
        """Record that nothing may be split, because of one step."""
        self.blocked = self.blocked or reason
        self.blockers.setdefault(statement.index, reason)

    # ── running ────────────────────────────────────────────────────────────────────────────────────────────────
    def extend(self, statements: Sequence[AnalysisStep]) -> None:
        """Interpret further steps."""
        start = len(self.statements)
        self.statements += statements
        self.resume(start)

    def resume(self, at: int) -> None:
        """Interpret from a position on."""
        while at < len(self.statements):
            try:
                self._step(at)
                at += 1
            except DecisionDemand as demand:
                at = self._decide(demand.key, demand.decision)

    def demand(self, key: Hashable, decision: Any) -> bool:
        """Decide a value from outside; return False if that is impossible."""
        found = self._reach(key, decision)
        if found is None:
            return False
        self.resume(self._decide(found.key, found.decision))
        return True

    def _reach(self, key: Hashable, decision: Any) -> DecisionDemand | None:
        """Return a demand on a value, or, for a mean made by an in-place write, on the value written."""
        if self._possible(key, decision):
            return DecisionDemand(key, decision)
        maker = self.statements[self.origin[key]] if key in self.origin else None
        if decision != "share" or maker is None or maker.form is None or not maker.writes:
            return None
        for part in dict.fromkeys(map(self.key, form_refs(maker.form))):
            value = self.values.get(part)
            if value is not None and part not in maker.writes and isinstance(value.kind, WeightedPartial):
                return self._reach(part, decision)
        return None

    def _decide(self, key: Hashable, decision: Any) -> int:
        at = self.origin[key]
        if isinstance(decision, RowIndexDecision):
            self.pointers[key] = decision.rows
        else:
            self.decisions[self.statements[at].index] = decision
        if not self.has_overwrites:
            return self._before_writes(at) if self.forgets else at
        self.blocked = ""  # set by a write, which is analysed again
        self.blockers.clear()
        return 0

    def _before_writes(self, at: int) -> int:
        """Return where to restart so that no later write of a tape has made values unknown yet."""
        begin = next(at for at, statement in enumerate(self.statements) if not statement.traced)
        return begin if at >= begin else 0

    def _possible(self, key: Hashable, decision: Any) -> bool:
        """Return whether a decision can still be made."""
        statement = self.statements[self.origin[key]] if key in self.origin else None
        if isinstance(decision, RowIndexDecision):
            free = statement is not None and not self.frozen and (statement.flaggable or statement.returns_several)
            return free and key not in self.pointers and self.values[key].known and not self.values[key].grad
        if statement is None or self.frozen or statement.index in self.decisions:
            return False
        if isinstance(decision, Shard):
            return self.values[key].operand
        value = self.values[key]
        if not statement.flaggable or len(statement.results) != 1:
            return False
        return decision != "whole" or (value.known and not value.grad)

    def _step(self, at: int) -> None:
        statement = self.statements[at]
        reason = ""
        try:
            kinds = self._kinds(statement)
        except AnalysisRefused as refused:
            reason = str(refused) if isinstance(refused, InheritedRefusal) else f"{statement.where}: {refused}"
            kinds = [Opaque(reason)] * len(statement.results)
        known = statement.pure and not statement.random and self._is_known(statement)
        for (key, result), kind in zip(statement.results, kinds, strict=True):
            if key in statement.writes:
                overwrite(self, statement, key, kind)
            self.origin[key] = at
            checked = check_against_sizes(kind, result, statement)
            if isinstance(checked, PerMicroBatch) and not statement.traced:  # an output
                checked = Opaque("an output for every sample")
            name, given = self.alias.get(key, key), statement.name in ("operand", "numbers")
            value = TensorValue(name, checked, result.shape, result.dtype, result.grad, known, given)
            value = replace(value, numbers=statement.name == "numbers", sized=result.batch)
            if statement.name in REPEATING and statement.run is None and not known and isinstance(checked, Shard):
                value = replace(value, repeats=repeats(statement.name, self.arguments(statement)[0], value))
            if statement.traced and statement.form is not None and not statement.random:
                value = replace(value, invariance=self._find_invariance(statement, value))
            self.values[key] = value
            self._apply_decision(statement, value, result)
        self._split_results(statement)
        for key in statement.writes:
            write(self, statement, key)
        if reason and statement.writes and not statement.results:  # the contents are unknown
            self.has_overwrites = True
            self.block(statement, reason)
        if statement.writes and not statement.traced:
            forget_aliases(self, statement)

    def _find_invariance(self, statement: AnalysisStep, value: TensorValue) -> Any:
        """Return which part of a result is equal for all samples."""
        from gemini.batch_analysis.batch_invariance import FOLLOWED, find_invariance

        if statement.name not in FOLLOWED or not isinstance(value.kind, (Shard, Partial)):
            return None
        try:
            return find_invariance(statement.name, *self.arguments(statement), value)
        except (AnalysisRefused, *_BUGS):  # unsupported arguments
            return None

    def _is_known(self, statement: AnalysisStep) -> bool:
        if statement.known is not None:
            return statement.known
        try:
            args, kwargs = self.arguments(statement)
        except AnalysisRefused:
            return False
        return all(leaf.known for leaf in leaves((args, kwargs)) if isinstance(leaf, TensorValue))

    def _apply_decision(self, statement: AnalysisStep, value: TensorValue, result: ResultMeta) -> None:
        """Apply the decision on a result; an opaque one that is known before the step is replaced, where possible."""
        decision = self.decisions.get(statement.index)
        free = value.known and not value.grad and statement.flaggable and not self.frozen
        if isinstance(value.kind, Opaque) and decision is None and free and len(statement.results) == 1:
            divisible = is_divisible(result, statement.samples)
            decision = "whole" if result.batch is None else "part" if divisible else None
            if decision is not None:
                self.decisions[statement.index] = decision
        kind: Kind = value.kind
        share: Weight | None = None
        if decision == "share" and isinstance(kind, WeightedPartial):
            share, kind = kind.share, Partial()
        elif decision == "times" and isinstance(kind, Partial):
            kind, share = WeightedPartial(UniformWeight()), CountWeight()
        elif decision == "once" and isinstance(kind, Replicate):
            kind, share = Partial(), UniformWeight()
        elif decision == "whole" and free and result.batch is None:
            kind, share = Replicate(), WholeValue(value.key)
        elif decision == "part" and free and isinstance(result.batch, int):
            kind = Shard(result.batch, result.shape[result.batch] // statement.samples)
            share = PartValue(value.key, kind)
        if share is not None:
            self.shares[statement.index] = share
            self.values[statement.results[0][0]] = replace(value, kind=kind)
        else:
            self.shares.pop(statement.index, None)

    def _split_results(self, statement: AnalysisStep) -> None:
        """Replace the results of a function with several results of unknown kind, or with row indices."""
        found = None
        if not self.frozen and (statement.returns_several or any(key in self.pointers for key, _ in statement.results)):
            found = split_results(statement.results, self.values, statement.samples, self.pointers)
        if found is not None:
            for (key, _), kind in zip(statement.results, found[0], strict=True):
                self.values[key] = replace(self.values[key], kind=kind)
            self.shares[statement.index] = found[1]

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────
    def arguments(self, statement: AnalysisStep) -> tuple[Any, Any]:
        """Return (args, kwargs) with values in place of tensors."""
        read = partial(self._read_late, statement.late) if statement.late else self.read
        try:
            if isinstance(statement.form, tuple):
                args, kwargs = (decode(form, read) for form in statement.form)
            else:
                args, kwargs = decode(statement.form, read)
        except TypeError as error:  # a torch.Size takes whole numbers only
            raise AnalysisRefused("a size among its arguments depends on the number of samples") from error
        return args, kwargs

    def _read_late(self, late: tuple[int, ...], form: Any) -> Any:
        """Return a value; if it was written since it was made, with the properties that hold after these writes."""
        value = self.read(form)
        writes = tuple(write for write in late if isinstance(value, TensorValue) and write > form.node)
        if not writes:
            return value
        if not is_known_after_writes(self, value, self.key(form), writes):
            value = replace(value, invariance=None)
        ahead = form.node in self.precomputable and all(write in self.precomputable for write in writes)
        if ahead and isinstance(value.kind, Shard) and not value.grad:
            return replace(value, key=WrittenValue(form, writes), known=True, repeats=None)
        return replace(value, known=False, repeats=None)

    def read(self, form: Any) -> Any:
        """Return the value of a reference or a number."""
        from gemini.batch_analysis.batch_counts import number_kind
        from gemini.ir.pytree import Number, Ref

        if isinstance(form, Ref):
            key = self.key(form)
            if key not in self.values:
                raise AnalysisRefused(f"it reads {form}, which was not analysed")
            return self.values[key]
        if isinstance(form, Number):
            return number_kind(form.expr, self.values)
        return None  # an object of the model

    def _kinds(self, statement: AnalysisStep) -> Sequence[Kind]:
        found: Any
        if statement.role:
            return expand_kinds(kind_of_role(statement, *self.arguments(statement)), len(statement.results))
        if statement.run is not None:
            if statement.form is not None and self.is_rolled:
                refuse_per_micro_batch(*self.arguments(statement))
            return expand_kinds(statement.run(self, statement), len(statement.results))
        args, kwargs = self.arguments(statement)
        if self.is_rolled:
            refuse_per_micro_batch(args, kwargs)
        call = OpCall(
            statement.name, args, kwargs, statement.samples, [r for _, r in statement.results], statement.traced
        )
        call.random, call.index, call.least = statement.random, statement.index, self.least
        found = self._judge(statement, call)
        if call.conditions and self.frozen:
            raise AnalysisRefused(f"{call.name} by a mask, inside a layer")
        self.assumed[statement.index], self.conditions[statement.index] = call.assumed, call.conditions
        if call.sizes:
            self.sizes[statement.index] = call.sizes
        else:
            self.sizes.pop(statement.index, None)
        return expand_kinds(found, len(statement.results))

    def _judge(self, statement: AnalysisStep, call: OpCall) -> Any:
        numbers = [leaf for leaf in leaves((call.args, call.kwargs)) if isinstance(leaf, (SampleCount, UnknownNumber))]
        tensors = call.tensors()
        if all(value.is_constant for value in tensors) and not numbers:
            return Replicate()
        opaque = next((value for value in tensors if isinstance(value.kind, Opaque)), None)
        if opaque is not None:
            raise InheritedRefusal(opaque.kind.reason)  # type: ignore[union-attr]
        rule = find_rule(statement.name)
        try:
            if rule is None and not uses_sorted_rows(call):
                raise AnalysisRefused("it has no rule")
            if numbers and statement.name not in COUNTING:
                raise AnalysisRefused("it uses the number of samples")
            found = sorted_rows_kind(call, rule) if rule is None or uses_sorted_rows(call) else rule(call)
            refuse_scattered_random_numbers(call, found)
            return found
        except DecisionDemand as demand:
            nearest = self._reach(demand.key, demand.decision)
            raise (nearest or self._alternative(call, demand)) from None
        except _BUGS as error:
            raise AnalysisRefused(f"its arguments are not supported ({error!s:.60})") from error
        except AnalysisRefused as refused:
            read = [self.values[key] for key in map(self.key, form_refs(statement.form)) if key in self.values]
            raise (self._demand_whole(read) or refused) from None

    def _alternative(self, call: OpCall, demand: DecisionDemand) -> Exception:
        """Return the alternative to an impossible demand: constants added to a sum can become a sum."""
        if demand.decision == "times":
            for value in call.tensors():
                if value.is_constant and self._possible(value.key, "once"):
                    return DecisionDemand(value.key, "once")
        return self._demand_whole(call.tensors()) or AnalysisRefused(
            "its parts are needed both weighted and unweighted"
        )

    def _demand_whole(self, tensors: Sequence[TensorValue]) -> DecisionDemand | None:
        """Demand that a sum over the batch that is known before the step is replaced by its value."""
        for value in tensors:
            if value.is_sum and self._possible(value.key, "whole"):
                return DecisionDemand(value.key, "whole")
        return None
