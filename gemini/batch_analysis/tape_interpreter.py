"""Tape interpreter: runs recorded ops on real tensors, each in the autograd modes it was recorded in.

Used by workers for the loss of a micro-batch, by the numeric check for its reference run, by eager replay for a tape.

In-place writes: an op with `writes = w` changes the tensor of value w, and the tape numbers the contents after the
write `results[0]`. After the op both numbers refer to the tensor that was passed as w, whatever the op returns
(`x.add_(y)` returns x, `x[i] = y` returns None). The recorder admits such an op only where no other value shares the
memory, so no third value changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from gemini.batch_analysis.loss_tape import Op, Tape
from gemini.batch_analysis.microbatch_weights import weigh
from gemini.ir.autograd_modes import RegionSwitch
from gemini.ir.encode import decode
from gemini.ir.pytree import Ref
from gemini.quiet_warnings import mute_warnings

_NONE: Mapping[int, Any] = {}


class OpRaised(Exception):
    """An op of a tape raised `error`; `op` is the name of its function."""

    def __init__(self, error: BaseException, op: str) -> None:
        super().__init__(error)
        self.error, self.op = error, op


class FailedValue:
    """Represents a value whose op raised, or read another failed value."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def run_ops(
    ops: Iterable[tuple[int, Op]],
    values: dict[int, Any],
    *,
    operands: Mapping[int, torch.Tensor] = _NONE,
    weights: Mapping[int, Any] = _NONE,
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
    keep_failures: bool = False,
) -> None:
    """Run ops, each with its index in the tape; `values` holds their inputs and receives their results.

    A value that is not in `values` is read from `operands`. The result of an op in `weights` is weighted, and every new
    tensor converted by `convert`. With `keep_failures` an op that raises leaves a `FailedValue` in place of each
    result, and so does every op that reads one; otherwise `OpRaised` ends the run.
    """
    with RegionSwitch() as regions:
        for at, op in ops:
            failed = _failed_input(op, values) if keep_failures else None
            if failed is None:
                try:
                    regions.to(op.region)
                    _run_op(op, values, operands, weights.get(at), convert)
                    continue
                except Exception as error:
                    if not keep_failures:
                        raise
                    failed = FailedValue(error.error if isinstance(error, OpRaised) else error)
            values.update(dict.fromkeys(op.results, failed))


def _failed_input(op: Op, values: dict[int, Any]) -> FailedValue | None:
    return next((found for n in op.reads() if isinstance(found := values.get(n), FailedValue)), None)


def replay_tape(tape: Tape, ops: Iterable[int], values: dict[int, Any]) -> None:
    """Run some ops of a tape on its operands; errors are stored until the script reads one of the results."""
    run_ops(((at, tape.ops[at]) for at in ops), values, operands=tape.operands, keep_failures=True)


def _run_op(
    op: Op,
    values: dict[int, Any],
    operands: Mapping[int, torch.Tensor],
    weight: Any,
    convert: Callable[[torch.Tensor], torch.Tensor] | None,
) -> None:
    def read(ref: Ref) -> torch.Tensor:
        found = values.get(ref.node)
        return operands[ref.node] if found is None else found

    args, kwargs = decode(op.form, read)
    try:
        with mute_warnings():  # it warned when the script called it
            returned = op.function(*args, **kwargs)
    except Exception as error:
        raise OpRaised(error, getattr(op.function, "__name__", str(op.function))) from error
    if op.writes is not None:
        values.update(dict.fromkeys((op.writes, *op.results[:1]), read(Ref(op.writes))))
        return
    made = _distinct_tensors(returned if weight is None else weigh(returned, weight))
    values.update(zip(op.results, made if convert is None else map(convert, made), strict=True))


def _distinct_tensors(returned: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an op returned, each once, in the order in which `results` numbers them."""
    seen: set[int] = set()
    stack = [returned]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            if id(value) not in seen:
                seen.add(id(value))
                yield value
        elif isinstance(value, (list, tuple)):
            stack += reversed(value)
        elif isinstance(value, dict):
            stack += reversed(value.values())
