"""All uses of the tape interpreter treat in-place writes equally: worker, reference run, eager replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gemini.batch_analysis.loss_tape import Meta, Op, Tape
from gemini.batch_analysis.reference_run import run_tape
from gemini.batch_analysis.tape_interpreter import FailedValue, OpRaised, replay_tape, run_ops
from gemini.ir.autograd_modes import Region
from gemini.ir.pytree import Form, Literal, MappingForm, Ref, SequenceForm

OUTPUT, OPERAND, PRODUCT, ADDED, ASSIGNED, ROOT = range(6)


def form(*args: Form) -> Form:
    return SequenceForm(tuple, (SequenceForm(tuple, args), MappingForm(dict, ())))


def written_tape() -> Tape:
    """`y = x * 2; y.add_(o); y[0] = 5; loss = y.sum()`: one write that returns its target, one that returns None."""
    region = Region.current()
    operand = torch.tensor([1.0, 2.0, 3.0])
    ops = [
        Op(torch.mul, form(Ref(OUTPUT), Literal(2.0)), region, (PRODUCT,)),
        Op(torch.Tensor.add_, form(Ref(PRODUCT), Ref(OPERAND)), region, (ADDED,), writes=PRODUCT),
        Op(torch.Tensor.__setitem__, form(Ref(ADDED), Literal(0), Literal(5.0)), region, (ASSIGNED,), writes=ADDED),
        Op(torch.sum, form(Ref(ASSIGNED)), region, (ROOT,)),
    ]
    return Tape(1, [Meta.of(torch.zeros(3))] * 6, {OPERAND: operand}, ops)


def by_worker(tape: Tape, x: torch.Tensor) -> dict[int, Any]:
    values = {OUTPUT: x, **tape.operands}
    run_ops(enumerate(tape.ops), values)
    return values


def by_reference(tape: Tape, x: torch.Tensor) -> dict[int, Any]:
    return run_tape(tape, [x], tape.operands)


def by_replay(tape: Tape, x: torch.Tensor) -> dict[int, Any]:
    values: dict[int, Any] = {OUTPUT: x}
    replay_tape(tape, range(len(tape.ops)), values)
    return values


RUNS = [by_worker, by_reference, by_replay]


@pytest.mark.parametrize("run", RUNS)
def test_a_written_value_and_its_later_contents_are_one_tensor(run: Callable[..., dict[int, Any]]) -> None:
    x = torch.tensor([1.0, 1.0, 1.0], requires_grad=True)
    values = run(written_tape(), x)
    assert values[PRODUCT] is values[ADDED] is values[ASSIGNED]
    assert values[ASSIGNED].tolist() == [5.0, 4.0, 5.0]
    assert float(values[ROOT]) == 14.0
    values[ROOT].backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 2.0, 2.0]  # the assigned entry is no longer a function of x


def test_a_failed_write_fails_what_reads_it_and_nothing_else() -> None:
    tape = written_tape()
    tape.operands[OPERAND] = torch.ones(4)
    values: dict[int, Any] = {OUTPUT: torch.ones(3)}
    replay_tape(tape, range(len(tape.ops)), values)
    assert isinstance(values[ROOT], FailedValue)
    assert isinstance(values[ROOT].error, RuntimeError)
    assert values[PRODUCT].tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(OpRaised, match="size of tensor") as raised:
        by_worker(tape, torch.ones(3))
    assert raised.value.op == "add_"
    with pytest.raises(RuntimeError, match="size of tensor"):
        by_reference(tape, torch.ones(3))
