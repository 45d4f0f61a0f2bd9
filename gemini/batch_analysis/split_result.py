"""Splitting: how a step on N samples becomes M steps on a part of them each, with the same loss and gradients.

    whole batch        loss = mean over 8 samples
    micro-batches      3/8 · mean over 3   +   3/8 · mean over 3   +   2/8 · mean over 2

Every value of a step is one of these, seen from its micro-batches:

| kind       | the whole value is                                                                    |
|------------|---------------------------------------------------------------------------------------|
| Constant   | that of any micro-batch                                                               |
| Sample     | those of the micro-batches, one after the other in a dimension                        |
| Positions  | 0, 1, 2 … : each run numbers its own samples                                          |
| Pointers   | the same, each with the number of rows before its own added                           |
| Arranged   | sorted, each run for itself, and not yet put back in order                            |
| Apart      | a value for every micro-batch, in a loop over samples, not yet joined                 |
| Partial    | their sum                                                                             |
| Mean       | their sum, each times its share of the batch; the shares add up to one                |
| Opaque     | not to be had from them                                                               |

A *share* is what the result of a node, or of an op of the tape, is multiplied by in a micro-batch (or replaced with).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gemini.batch_analysis.assumptions import Condition
from gemini.batch_analysis.batch_kinds import Kind, SplittingError
from gemini.batch_analysis.loss_tape import Op
from gemini.batch_analysis.microbatch_weights import PrecomputedValues, Weight, replace_part
from gemini.ir.pytree import Literal, SequenceForm

NUMBERS = -1  # in `Splitting.sizes`: not a number of samples, but the list of their numbers


@dataclass(frozen=True)
class Splitting:
    """How a step splits, or why not.

    `inputs` are in the order of `Call(args, kwargs).tensors` where the proof was given the call, else in that of
    `graph.inputs`. `outputs` has a kind for every value of the tape. `sizes` are plain numbers in ops of the tape that
    count samples: {op: {path in its form: entries a sample}}.
    """

    reason: str = ""
    inputs: tuple[int | None, ...] = ()
    operands: dict[int, int | None] = field(default_factory=dict)
    outputs: tuple[Kind, ...] = ()
    node_shares: dict[int, Weight] = field(default_factory=dict)
    op_shares: dict[int, Weight] = field(default_factory=dict)
    sizes: dict[int, dict[tuple[int, ...], int]] = field(default_factory=dict)
    numbers: tuple[int, ...] = ()  # operands that must hold 0, 1, 2 … in every step; a micro-batch has its own
    conditions: tuple[Condition, ...] = ()  # must hold in every step

    def __bool__(self) -> bool:
        return not self.reason

    def op(self, at: int, op: Op, samples: int) -> Op:
        """The op of a tape as a micro-batch of so many samples runs it."""
        form = op.form
        for path, entries in self.sizes.get(at, {}).items():
            form = replace_part(form, path, _range(samples) if entries == NUMBERS else Literal(entries * samples))
        return op if form is op.form else replace(op, form=form)

    def needs(self) -> tuple[Hashable, ...]:
        """The values that shares are computed from."""
        shares = (*self.node_shares.values(), *self.op_shares.values())
        keys = [key for share in shares for key in share.needs()]
        return tuple(dict.fromkeys([*keys, *(key for one in self.conditions for key in one.needs())]))

    def weights(
        self, known: PrecomputedValues, sizes: Sequence[int]
    ) -> tuple[Mapping[int, list[Any]], Mapping[int, list[Any]]]:
        """The factors of flagged nodes and of flagged ops, one a micro-batch.

        Raises SplittingError where an operand or a mask is not what the proof relied on.
        """
        for condition in self.conditions:
            reason = condition.violation(known, sum(sizes))
            if reason:
                raise SplittingError(reason)
        for number in self.numbers:
            operand = known.value(("tape", number))
            if not torch.equal(operand, torch.arange(sum(sizes), device=operand.device)):
                raise SplittingError(f"operand {number} of the loss does not number the samples as it did")
        nodes = {at: share.weights(known, sizes) for at, share in self.node_shares.items()}
        ops = {at: share.weights(known, sizes) for at, share in self.op_shares.items()}
        return nodes, ops


def _range(samples: int) -> SequenceForm:
    return SequenceForm(list, tuple(Literal(index) for index in range(samples)))
