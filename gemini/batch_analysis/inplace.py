"""In-place writes: their effect on the kinds of values that share memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING

from gemini.batch_analysis.analysis_steps import AnalysisStep, form_refs
from gemini.batch_analysis.batch_kinds import Kind, Opaque, SortedRows
from gemini.batch_analysis.op_call import TensorValue

if TYPE_CHECKING:
    from gemini.batch_analysis.propagate import KindInterpreter

_VIEWS = (
    "getitem", "select", "view", "reshape", "unbind", "split", "chunk", "squeeze", "unsqueeze", "narrow", "expand",
)  # fmt: skip
_OTHER_TYPES = ("view", "real", "imag", "get_real", "get_imag", "view_as_real", "view_as_complex", "")


def overwrite(interpreter: KindInterpreter, statement: AnalysisStep, key: Hashable, kind: Kind) -> None:
    """Handle `x[i] = y`: the kind of x must not change, since views of it were analysed; a new value has none."""
    old, maker = interpreter.values[key].kind, interpreter.statements[interpreter.origin[key]].name
    if old == kind or (isinstance(kind, SortedRows) and maker == "empty_like"):
        return
    interpreter.has_overwrites = True
    interpreter.block(
        statement,
        kind.reason if isinstance(kind, Opaque) else f"{statement.where}: a write that reaches other values",
    )


def write(interpreter: KindInterpreter, statement: AnalysisStep, key: Hashable) -> None:
    """Set the kind of a written value to that of the result; other values may share its memory."""
    if not statement.results or key == statement.results[0][0] or key not in interpreter.values:
        return
    old, new = interpreter.values[key], interpreter.values[statement.results[0][0]]
    maker = interpreter.statements[interpreter.origin[key]]
    if old.kind != new.kind and not _loses_keys(interpreter, old, new):
        interpreter.has_overwrites = True
        if (
            maker.name in _VIEWS
            or maker.form is None
            or old.rank
            or _has_other_reader(interpreter, statement, key)
            or isinstance(new.kind, Opaque)
        ):
            reason = new.kind.reason if isinstance(new.kind, Opaque) else f"{statement.where}: a write in place"
            interpreter.block(statement, reason)
    interpreter.values[key] = replace(old, kind=new.kind, known=False, invariance=None)


def _has_other_reader(interpreter: KindInterpreter, statement: AnalysisStep, key: Hashable) -> bool:
    """Return whether anything but a write read a value before: it may be a view, which shows the write."""
    made, now = interpreter.origin[key], interpreter.origin[statement.results[0][0]]
    between = interpreter.statements[made + 1 : now]
    return any(
        key not in one.writes and key in map(interpreter.key, form_refs(one.form))
        for one in between
        if one.form is not None
    )


def _loses_keys(interpreter: KindInterpreter, old: TensorValue, new: TensorValue) -> bool:
    """Return whether a write turns sorted keys into mere rows of that sort, of which no other value can be a view."""
    before, after = old.kind, new.kind
    if not isinstance(before, SortedRows) or before.role != "keys" or after != replace(before, role="rows"):
        return False
    others = [value for value in interpreter.values.values() if value.kind == before and value.key != old.key]
    return all(value.dtype != old.dtype for value in others)


def forget_aliases(interpreter: KindInterpreter, statement: AnalysisStep) -> None:
    """Make values unknown that may share memory with a written one: a tape does not record aliases."""
    written = {value.dtype for key in statement.writes if (value := interpreter.values.get(key)) is not None}
    ops = (one for one in interpreter.statements if not one.traced)
    anything = not written or interpreter.mixes or any(_reinterprets(interpreter, one) for one in ops)
    for key, value in interpreter.values.items():
        if anything or value.dtype in written:
            interpreter.values[key] = replace(value, known=False, repeats=None)
    interpreter.forgets = True


def _reinterprets(interpreter: KindInterpreter, statement: AnalysisStep) -> bool:
    """Return whether an op may view memory as another type; other views have the type of their base."""
    if statement.name not in _OTHER_TYPES or statement.form is None:
        return False
    read = {
        interpreter.values[key].dtype
        for key in map(interpreter.key, form_refs(statement.form))
        if key in interpreter.values
    }
    return any(result.dtype not in read for _, result in statement.results)


def is_known_after_writes(
    interpreter: KindInterpreter, value: TensorValue, key: Hashable, writes: tuple[int, ...]
) -> bool:
    """Return whether the known kind of a value holds after some writes: the last one set it, or none reaches it."""
    if interpreter.statements[interpreter.origin[key]].index == max(writes):
        return True
    makers = [one for one in interpreter.statements if one.index in writes]
    written = [interpreter.values.get(one) for maker in makers for one in maker.writes]
    return all(one is not None and one.dtype != value.dtype for one in written)
