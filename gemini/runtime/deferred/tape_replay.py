"""Replay: the ops of a tape on real tensors, each in the region it was called in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gemini.batch_analysis.loss_tape import Op, Tape
from gemini.ir.autograd_modes import RegionSwitch
from gemini.ir.encode import decode
from gemini.ir.pytree import Ref
from gemini.quiet_warnings import muted


class Failure:
    """In the place of a value whose op has raised."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def replay(tape: Tape, ops: Iterable[int], values: dict[int, Any]) -> None:
    """Run ops; `values` has what they read, and gets their results."""
    with RegionSwitch() as regions:
        for at in ops:
            op = tape.ops[at]
            failed = next((values[one] for one in op.reads() if isinstance(values.get(one), Failure)), None)
            if failed is None:
                try:
                    regions.to(op.region)
                    _run(op, tape, values)
                    continue
                except Exception as error:  # the program sees it when it reads one of the results
                    failed = Failure(error)
            values.update(dict.fromkeys(op.results, failed))


def _run(op: Op, tape: Tape, values: dict[int, Any]) -> None:
    def read(ref: Ref) -> torch.Tensor:
        found = values.get(ref.node)
        return tape.operands[ref.node] if found is None else found

    args, kwargs = decode(op.form, read)
    with muted():  # it has warned when the program called it
        returned = op.function(*args, **kwargs)
    if op.writes is not None:  # the same tensor, with other contents
        values[op.results[0]] = values[op.writes]
    else:
        values.update(zip(op.results, _distinct(returned), strict=True))


def _distinct(returned: Any) -> Iterator[torch.Tensor]:
    """The tensors that an op has returned, each once, in order: what `results` has numbers for."""
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
