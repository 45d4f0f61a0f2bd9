"""The tape of a step on one micro-batch: the program's own ops on outputs of the model, in the worker.

Each op runs in the region it was recorded in. The result of a reduction over samples is multiplied by the share of
this micro-batch, so that results of all micro-batches add up to that of the whole batch.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from gemini.capture.forms import Ref
from gemini.capture.numbers import evaluate
from gemini.capture.regions import Region
from gemini.capture.values import decode, tensors
from gemini.step.program import Loss


class TapeRaised(Exception):
    """An op of the tape raised."""

    def __init__(self, error: BaseException, op: str) -> None:
        super().__init__(error)
        self.error, self.op = error, op


def run_tape(loss: Loss, values: dict[int, Any], shares: dict[int, float]) -> dict[int, torch.Tensor]:
    """All values, from those of ports and operands; `shares` by the index of an op."""
    values = dict(values)
    read = _reader(values)
    for at, op in enumerate(loss.ops):
        args, kwargs = decode(op.form, read)
        with ExitStack() as stack:
            op.region.enter(stack, Region.current())
            try:
                made = op.function(*args, **kwargs)
            except Exception as error:
                raise TapeRaised(error, getattr(op.function, "__name__", str(op.function))) from error
            found = [tensor for _, tensor in tensors(made)]
            if at in shares:
                found = [tensor * shares[at] for tensor in found]
        if op.writes is not None and not found:
            found = [values[op.writes]]
        values.update(zip(op.results, found, strict=False))
    return values


def _reader(values: dict[int, Any]) -> Any:
    def read(form: Any) -> Any:
        if isinstance(form, Ref):
            return values[form.node]
        return evaluate(form.expr, lambda expr: _number(values, expr))

    return read


def _number(values: dict[int, Any], expr: Any) -> Any:
    """What an expression reads from a tensor."""
    value = values[expr.operands[0].node]
    if expr.op == "size":
        return value.shape[expr.operands[1]] if len(expr.operands) > 1 else value.shape
    found = getattr(value, expr.op)
    return found(*expr.operands[1:]) if callable(found) else found
