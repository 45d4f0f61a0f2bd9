"""Splitting: a step on N samples as M steps on parts of them, with the same loss and gradients.

    whole batch        loss = mean over 8 samples
    micro-batches      3/8 · mean over 3   +   3/8 · mean over 3   +   2/8 · mean over 2

The kind of a value defines how the whole-batch value follows from those of the micro-batches:

| kind            | the whole value is                                                                 |
|-----------------|------------------------------------------------------------------------------------|
| Replicate       | that of any micro-batch                                                            |
| Shard           | those of the micro-batches, concatenated in a dimension                            |
| SampleIndices   | 0, 1, 2 … : each run numbers its own samples                                       |
| RowIndices      | the same, each plus the number of rows before its own                              |
| SortedRows      | sorted, each run for itself, and not yet restored to the original order            |
| PerMicroBatch   | one value per micro-batch, in a loop over samples, not yet joined                  |
| Partial         | their sum                                                                          |
| WeightedPartial | their sum, each times its weight; the weights add up to one                        |
| Opaque          | not computable from them                                                           |

The *weight* of a node or tape op is the factor (or the replacement) of its result in a micro-batch.
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

NUMBERS = -1  # in `Splitting.sizes`: the list of the sample indices


@dataclass(frozen=True)
class Splitting:
    """How a step splits, or why not.

    `inputs` are in the order of `ModelCall(args, kwargs).tensors` where the proof had the call, else in that of
    `graph.inputs`. `outputs` has a kind per value of the tape. `sizes` are plain numbers in ops of the tape that count
    samples: {op: {path in its form: entries per sample}}.
    """

    reason: str = ""
    inputs: tuple[int | None, ...] = ()
    operands: dict[int, int | None] = field(default_factory=dict)
    outputs: tuple[Kind, ...] = ()
    node_shares: dict[int, Weight] = field(default_factory=dict)
    op_shares: dict[int, Weight] = field(default_factory=dict)
    sizes: dict[int, dict[tuple[int, ...], int]] = field(default_factory=dict)
    numbers: tuple[int, ...] = ()  # operands that must hold 0, 1, 2 … in every step
    conditions: tuple[Condition, ...] = ()  # must hold in every step

    def __bool__(self) -> bool:
        return not self.reason

    def op(self, at: int, op: Op, samples: int) -> Op:
        """Return the op of a tape for a micro-batch of this number of samples."""
        form = op.form
        for path, entries in self.sizes.get(at, {}).items():
            form = replace_part(form, path, _range(samples) if entries == NUMBERS else Literal(entries * samples))
        return op if form is op.form else replace(op, form=form)

    def needs(self) -> tuple[Hashable, ...]:
        """Return the values that weights and conditions are computed from."""
        shares = (*self.node_shares.values(), *self.op_shares.values())
        keys = [key for share in shares for key in share.needs()]
        return tuple(dict.fromkeys([*keys, *(key for one in self.conditions for key in one.needs())]))

    def weights(
        self, known: PrecomputedValues, sizes: Sequence[int]
    ) -> tuple[Mapping[int, list[Any]], Mapping[int, list[Any]]]:
        """Return the factors of weighted nodes and ops, one per micro-batch.

        Raises SplittingError where the contents of an operand or a mask violate an assumption of the proof.
        """
        for condition in self.conditions:
            reason = condition.violation(known, sum(sizes))
            if reason:
                raise SplittingError(reason)
        for number in self.numbers:
            operand = known.value(("tape", number))
            if not torch.equal(operand, torch.arange(sum(sizes), device=operand.device)):
                raise SplittingError(f"operand {number} of the loss does not hold the sample indices")
        nodes = {at: share.weights(known, sizes) for at, share in self.node_shares.items()}
        ops = {at: share.weights(known, sizes) for at, share in self.op_shares.items()}
        return nodes, ops


def _range(samples: int) -> SequenceForm:
    return SequenceForm(list, tuple(Literal(index) for index in range(samples)))
