"""The tape of a step on one micro-batch: the program's own ops on outputs of the model, in the worker.

Each op runs in the region it was recorded in. The result of a reduction over samples is multiplied by the share of
this micro-batch, so that results of all micro-batches add up to that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from gemini.batch_analysis.loss_tape import Op
from gemini.batch_analysis.microbatch_weights import weigh
from gemini.ir.autograd_modes import Region
from gemini.ir.encode import decode, tensors
from gemini.quiet_warnings import muted


class TapeRaised(Exception):
    """An op of the tape raised."""

    def __init__(self, error: BaseException, op: str) -> None:
        super().__init__(error)
        self.error, self.op = error, op


def run_tape(ops: Sequence[Op], values: Mapping[int, Any], shares: Mapping[int, Any]) -> dict[int, Any]:
    """All values, from those of ports and operands; `shares` by the index of an op."""
    values = dict(values)
    for at, op in enumerate(ops):
        args, kwargs = decode(op.form, lambda ref: values[ref.node])
        with ExitStack() as stack:
            op.region.enter(stack, Region.current())
            try:
                with muted():  # it has warned when the program called it
                    made = op.function(*args, **kwargs)
            except Exception as error:
                raise TapeRaised(error, getattr(op.function, "__name__", str(op.function))) from error
            if at in shares:
                made = weigh(made, shares[at])
        found = distinct(made)
        if not found and op.writes is not None:
            found = [values[op.writes]]
        values.update(zip(op.results, found, strict=True))
        if op.writes is not None and op.results:
            values[op.writes] = values[op.results[0]]
    return values


def distinct(made: Any) -> list[torch.Tensor]:
    """The tensors that an op has returned, each once, in order: what `results` has numbers for."""
    return list({id(tensor): tensor for _, tensor in tensors(made)}.values())
