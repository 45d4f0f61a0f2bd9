"""Loss analysis: from the kinds of a model's outputs to that of the loss recorded after it.

Numbers in a tape are plain, those of the whole batch: `total / 32` is a division by a constant. Operands are replicated
until an op combines them with samples; the op, never their size alone, determines which of their dimensions counts
samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from gemini.batch_analysis.analysis_steps import AnalysisStep
from gemini.batch_analysis.batch_kinds import Kind, Opaque, Partial, Replicate, Shard, WeightedPartial
from gemini.batch_analysis.graph_analysis import GraphKinds, find_size_branch, settle_guards
from gemini.batch_analysis.loss_tape import Meta, Op, Tape
from gemini.batch_analysis.op_call import AnalysisRefused, ResultMeta, TensorValue, leaves
from gemini.batch_analysis.propagate import KindInterpreter
from gemini.batch_analysis.rules.registry import short_name
from gemini.batch_analysis.split_result import Splitting
from gemini.ir.def_use import rewrite_refs
from gemini.ir.op_targets import op_name
from gemini.ir.pytree import Ref
from gemini.ir.pytree import leaves as form_leaves


def prove(forms: GraphKinds, tape: Tape, root: int, samples: int | None = None) -> Splitting:
    """Return the splitting of a value of a tape, the loss: its weights, if it is a sum over micro-batches.

    `samples` is the number of samples in this batch, if no output determines it.
    """
    if forms.reason:
        return Splitting(forms.reason)
    found = tape_outputs(forms, tape)
    if found is None:
        return Splitting(f"the model returned {tape.outputs} tensors, its graph {len(forms.graph.outputs())}")
    count = samples or _samples(forms, found, tape)
    interpreter = forms.interpreter.copy()
    interpreter.key = lambda ref: ref if (ref.source, ref.path) != _TAPE else ("tape", ref.node)
    _interpret(interpreter, forms, tape, found, count)
    reason = _make_root_partial(interpreter, tape, root)
    settle_guards(interpreter, forms.graph)
    interpreter.blocked = interpreter.blocked or find_size_branch(interpreter, forms.graph, count)
    return _build_splitting(interpreter, forms, tape, interpreter.blocked or reason)


_TAPE = ("tape", ())


def tape_outputs(forms: GraphKinds, tape: Tape) -> list[Ref] | None:
    """Return the values of the graph that the tape begins with."""
    once = forms.graph.outputs()
    every = [leaf for leaf in form_leaves(forms.graph.result) if isinstance(leaf, Ref)]
    return next((found for found in (once, every) if len(found) == tape.outputs), None)


def _samples(forms: GraphKinds, outputs: list[Ref], tape: Tape) -> int:
    for ref, meta in zip(outputs, tape.metas, strict=False):
        kind = forms.kind(ref)
        if isinstance(kind, Shard) and kind.entries:
            return meta.shape[kind.dim] // kind.entries
    return 1


def _interpret(interpreter: KindInterpreter, forms: GraphKinds, tape: Tape, outputs: list[Ref], samples: int) -> None:
    statements: list[AnalysisStep] = []
    for number, ref in enumerate(outputs):
        interpreter.alias["tape", number] = ref
        statements.append(_source_step(tape.metas[number], number, samples, lambda at, _, ref=ref: at.values[ref].kind))
        statements[-1].known = forms.interpreter.values[ref].known if ref in forms.interpreter.values else False
    for number, tensor in tape.operands.items():
        statements.append(_source_step(Meta.of(tensor), number, samples, _operand))
        statements[-1].known = True
        statements[-1].name = "numbers" if _numbers(tensor, samples) else "operand"
    statements += [_op_step(at, op, tape, samples) for at, op in enumerate(tape.ops)]
    interpreter.mixes = _mixes(tape.operands.values())
    interpreter.extend(statements)


def _mixes(operands: Iterable[torch.Tensor]) -> bool:
    """Return whether tensors of different types share memory."""
    types: dict[int, torch.dtype] = {}
    for one in operands:
        at = one.untyped_storage().data_ptr() if one.layout is torch.strided else 0
        if at and types.setdefault(at, one.dtype) is not one.dtype:
            return True
    return False


def _numbers(tensor: torch.Tensor, samples: int) -> bool:
    """Return whether an operand holds the indices of the samples."""
    if tensor.dtype != torch.int64 or tuple(tensor.shape) != (samples,):
        return False
    return bool(torch.equal(tensor, torch.arange(samples, device=tensor.device)))


def _source_step(meta: Meta, number: int, samples: int, run: Any) -> AnalysisStep:
    result = ResultMeta(meta.shape, meta.dtype, meta.requires_grad, "?")
    key = ("tape", number)
    return AnalysisStep(
        key, "given", None, [(key, result)], samples, False, f"value {number}", flaggable=False, run=run
    )


def _operand(interpreter: KindInterpreter, statement: AnalysisStep) -> Kind:
    decided = interpreter.decisions.get(statement.index)
    return decided if isinstance(decided, Shard) else Replicate()


def _op_step(at: int, op: Op, tape: Tape, samples: int) -> AnalysisStep:
    results = []
    for number in op.results:
        meta = tape.metas[number]
        results.append((("tape", number), ResultMeta(meta.shape, meta.dtype, meta.requires_grad, "?")))
    name = op_name(op.function) if callable(op.function) else ""
    made = AnalysisStep(
        ("op", at), short_name(name), _mark_tape_refs(op.form), results, samples, False, f"the loss: {name}"
    )
    made.pure, made.writes = op.writes is None, () if op.writes is None else (("tape", op.writes),)
    made.flaggable = len(op.results) == 1 and op.writes is None
    if not name:
        called = getattr(op.function, "__qualname__", repr(op.function))
        made.where = f"the loss: {called}"
        made.run = _foreign_function_kind
    return made


def _foreign_function_kind(interpreter: KindInterpreter, statement: AnalysisStep) -> Kind:
    given = [leaf for leaf in leaves(interpreter.arguments(statement)) if isinstance(leaf, TensorValue)]
    if all(value.is_constant for value in given):
        return Replicate()
    raise AnalysisRefused("a function outside torch")


def _mark_tape_refs(form: Any) -> Any:
    """Mark references to values of the tape, to distinguish them from those of the graph."""
    return rewrite_refs(form, lambda ref: replace(ref, source="tape") if isinstance(ref, Ref) else ref)


def _make_root_partial(interpreter: KindInterpreter, tape: Tape, root: int) -> str:
    """Make the root a sum over micro-batches; return why that is impossible."""
    key = ("tape", root)
    if tape.metas[root].shape != () and tape.metas[root].shape != (1,):
        return f"the loss has shape {tape.metas[root].shape}, not one entry"
    for _ in range(2):
        value = interpreter.values[key]
        if isinstance(value.kind, Partial):
            return ""
        wanted = (
            "share" if isinstance(value.kind, WeightedPartial) else "once" if isinstance(value.kind, Replicate) else ""
        )
        if not wanted:
            return value.kind.reason if isinstance(value.kind, Opaque) else "the loss has one entry per sample"
        if not interpreter.demand(value.key, wanted):
            return "the loss is needed both weighted and unweighted"
    return "the loss does not become a sum over micro-batches"


def _build_splitting(interpreter: KindInterpreter, forms: GraphKinds, tape: Tape, reason: str) -> Splitting:
    operands: dict[int, int | None] = {}
    for number in tape.operands:
        kind = interpreter.values["tape", number].kind
        operands[number] = kind.dim if isinstance(kind, Shard) else None
    kinds: tuple[Kind, ...] = tuple(interpreter.values["tape", number].kind for number in range(len(tape.metas)))
    if interpreter.blocked:
        kinds = (Opaque(interpreter.blocked),) * len(kinds)
    nodes = {index: share for index, share in interpreter.shares.items() if isinstance(index, int)}
    ops = {index[1]: share for index, share in interpreter.shares.items() if isinstance(index, tuple)}
    sizes = {index[1]: found for index, found in interpreter.sizes.items() if isinstance(index, tuple)}
    assumed = {key[1] for keys in interpreter.assumed.values() for key in keys if isinstance(key, tuple)}
    conditions = tuple(dict.fromkeys(one for each in interpreter.conditions.values() for one in each))
    return Splitting(reason, forms.inputs(), operands, kinds, nodes, ops, sizes, tuple(sorted(assumed)), conditions)
