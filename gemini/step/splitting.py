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
from typing import Any, Protocol

import torch

from gemini.capture.forms import Literal
from gemini.capture.forms import Mapping as MappingForm
from gemini.capture.forms import Sequence as SequenceForm
from gemini.errors import GeminiError
from gemini.step.tape import Op

NUMBERS = -1  # in `Splitting.sizes`: not a number of samples, but the list of their numbers


class SplittingError(GeminiError):
    """A step is not what its proof was about."""


@dataclass(frozen=True)
class Constant:
    """The same in every micro-batch."""


@dataclass(frozen=True)
class Sample:
    """Dimension `dim` counts samples: `outer` groups, in each the samples in order, `factor` entries a sample."""

    dim: int
    factor: int = 1
    outer: int = 1

    @property
    def entries(self) -> int:
        """How many entries of the dimension belong to one sample."""
        return self.factor * self.outer

    def take(self, whole: torch.Tensor, start: int, length: int, samples: int) -> torch.Tensor:
        """The part of some samples, one after the other in memory if the whole is: code may view it."""
        if self.outer == 1:
            part = whole.narrow(self.dim, start * self.factor, length * self.factor)
            return part.contiguous() if whole.is_contiguous() else part
        grouped = whole.unflatten(self.dim, (self.outer, samples * self.factor))
        part = grouped.narrow(self.dim + 1, start * self.factor, length * self.factor)
        return part.flatten(self.dim, self.dim + 1)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole of all parts."""
        if self.outer == 1:
            return torch.cat(list(parts), self.dim)
        grouped = [part.unflatten(self.dim, (self.outer, part.shape[self.dim] // self.outer)) for part in parts]
        return torch.cat(grouped, self.dim + 1).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True)
class Positions:
    """The numbers of the samples, 0 to n - 1, along a dimension."""

    dim: int


@dataclass(frozen=True)
class Pointers:
    """Numbers of rows of another tensor, which has `rows` a sample: every micro-batch counts its own from 0."""

    kind: Sample  # how they lie
    rows: int


@dataclass(frozen=True)
class Arranged:
    """Part of a run in which rows of all samples are sorted, worked on, and put back (experts).

    `role`: `keys` and `rows` are in sorted order; `order` says where they were; `inverse` where they went; `numbers`
    are 0, 1, 2 …; `tally` and `offsets` say how many rows there are of each key.
    """

    role: str
    order: Hashable
    entries: int  # rows a sample
    divisor: int = 1  # an order of rows, of which so many share a source


@dataclass(frozen=True)
class Apart:
    """Made in a loop over samples: the whole batch has one for every micro-batch, made of its samples alone."""


@dataclass(frozen=True)
class Partial:
    """Additive over micro-batches."""


@dataclass(frozen=True)
class Mean:
    """A mean over micro-batches, weighted by a share."""

    share: Share


@dataclass(frozen=True)
class Opaque:
    """Not to be had from micro-batches, and why."""

    reason: str


Kind = Constant | Sample | Positions | Pointers | Arranged | Apart | Partial | Mean | Opaque


@dataclass(frozen=True)
class Written:
    """The contents of a value after some writes in place."""

    value: Hashable
    writes: tuple[int, ...]  # nodes


class Known(Protocol):
    """What can be computed before a step, from its inputs and operands."""

    def value(self, key: Hashable) -> torch.Tensor:
        """The whole-batch contents of a value: a `Ref` of the graph, that `Written` to, or ("tape", number)."""

    def other_way(self) -> str:
        """Which branch of the Python of a rolled graph does not go as it did when captured; '' if all do."""


@dataclass(frozen=True)
class Share:
    """Factors of a result, one a micro-batch. This one: its share of the samples."""

    def weights(self, known: Known, sizes: Sequence[int]) -> list[Any]:  # noqa: ARG002
        """One factor a micro-batch of these sizes."""
        total = sum(sizes)
        return [size / total for size in sizes]

    def needs(self) -> tuple[Hashable, ...]:
        """The values that must be known."""
        return ()


@dataclass(frozen=True)
class Uniform(Share):
    """One of M."""

    def weights(self, known: Known, sizes: Sequence[int]) -> list[Any]:  # noqa: ARG002
        """1 / M each."""
        return [1 / len(sizes)] * len(sizes)


@dataclass(frozen=True)
class Times(Share):
    """M: makes a sum a mean of micro-batches, so that a constant can be added to it."""

    def weights(self, known: Known, sizes: Sequence[int]) -> list[Any]:  # noqa: ARG002
        """M each."""
        return [float(len(sizes))] * len(sizes)


@dataclass(frozen=True)
class Counted(Share):
    """The share of the targets that count: all but `ignore`, each as heavy as the weight of its class."""

    target: Hashable
    kind: Sample
    ignore: int | None
    weight: Hashable | None = None
    smoothed: bool = False  # labels are: a target of weight 0 adds to the mean all the same

    def weights(self, known: Known, sizes: Sequence[int]) -> list[Any]:
        """What a micro-batch's targets weigh, of what all weigh; all zero where nothing counts at all."""
        target = known.value(self.target)
        weight = None if self.weight is None else known.value(self.weight).detach().double()
        all_count = self.ignore is None or bool((target != self.ignore).all())
        heavy, start, total = [], 0, sum(sizes)
        if weight is None and all_count and target.numel():
            return [size / total for size in sizes]
        for size in sizes:
            part = self.kind.take(target, start, size, total)
            start += size
            if not all_count:
                part = part[part != self.ignore]
            heavy.append(float(part.numel()) if weight is None else float(weight[part].sum()))
            if self.smoothed and part.numel() and not heavy[-1]:
                raise SplittingError("the targets of a micro-batch weigh nothing, but their smoothed labels do")
        whole = sum(heavy)
        # 0 / 0 on the whole batch: every mean is nan, and so must be their sum.
        return [one / whole for one in heavy] if whole else [float("nan")] * len(sizes)

    def needs(self) -> tuple[Hashable, ...]:
        """The targets, and weights of classes."""
        return (self.target,) if self.weight is None else (self.target, self.weight)


@dataclass(frozen=True)
class Whole(Share):
    """Not a factor: the result is replaced by that of the whole batch, known before the step."""

    source: Hashable

    def weights(self, known: Known, sizes: Sequence[int]) -> list[Any]:
        """The value itself, as plain numbers, for every micro-batch."""
        return [("whole", known.value(self.source).detach().tolist())] * len(sizes)

    def needs(self) -> tuple[Hashable, ...]:
        """The value."""
        return (self.source,)


@dataclass(frozen=True)
class Part(Share):
    """Not a factor: the result is replaced by the samples' part of that of the whole batch, known before the step."""

    source: Hashable
    kind: Sample

    def weights(self, known: Known, sizes: Sequence[int]) -> list[Any]:
        """The part itself, as plain numbers, for every micro-batch."""
        whole, total = known.value(self.source).detach(), sum(sizes)
        rows, each = whole.shape[self.kind.dim], self.kind.entries
        if rows != total * each:
            raise SplittingError(f"a tensor has {rows} rows for {total} samples, and had {each} a sample")
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        parts = [self.kind.take(whole, start, size, total) for start, size in zip(starts, sizes, strict=True)]
        return [("whole", self.own(*one).tolist()) for one in zip(parts, starts, sizes, strict=True)]

    def own(self, part: torch.Tensor, start: int, size: int) -> torch.Tensor:  # noqa: ARG002
        """The part of some samples, as they have it."""
        return part

    def needs(self) -> tuple[Hashable, ...]:
        """The value."""
        return (self.source,)


@dataclass(frozen=True)
class Own(Part):
    """The same of numbers of rows, of which every sample has so many, and points to no other's."""

    rows: int = 1

    def own(self, part: torch.Tensor, start: int, size: int) -> torch.Tensor:
        """Counted from the first row of these samples."""
        found = part - start * self.rows
        if found.numel() and (int(found.min()) < 0 or int(found.max()) >= size * self.rows):
            raise SplittingError("rows of one sample are looked for among those of another")
        return found


@dataclass(frozen=True)
class Several(Share):
    """Shares of the tensors that one function returns, by place."""

    shares: tuple[tuple[int, Share], ...]

    def weights(self, known: Known, sizes: Sequence[int]) -> list[Any]:
        """Those of all, for every micro-batch."""
        found = [(place, share.weights(known, sizes)) for place, share in self.shares]
        return [("each", [(place, each[mid]) for place, each in found]) for mid in range(len(sizes))]

    def needs(self) -> tuple[Hashable, ...]:
        """The values of all."""
        return tuple(key for _, share in self.shares for key in share.needs())


class _Nothing(torch.autograd.Function):  # type: ignore[misc]
    """0, and no gradient at all: one of 0 would become nan on its way back through 0 / 0."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> None:  # noqa: ARG004
        return None


@dataclass(frozen=True)
class Each:
    """What must hold in every step: of a mask, every sample has so many entries that are true (or none has any)."""

    mask: Hashable
    kind: Sample
    entries: int
    or_none: bool = False

    def broken(self, known: Known, samples: int) -> str:
        """How it does not hold; '' if it does."""
        mask = known.value(self.mask).detach()
        counts = [int(self.kind.take(mask, at, 1, samples).count_nonzero()) for at in range(samples)]
        wrong = next((at for at, count in enumerate(counts) if count != self.entries), None)
        if wrong is None or (self.or_none and not any(counts)):
            return ""
        return (
            f"a mask selects {counts[wrong]} entries of sample {wrong}, and {self.entries} of those it was proven for"
        )

    def needs(self) -> tuple[Hashable, ...]:
        """The mask."""
        return (self.mask,)


@dataclass(frozen=True)
class Filled:
    """What must hold in every step: all entries of a tensor are this number."""

    tensor: Hashable
    number: int

    def broken(self, known: Known, samples: int) -> str:  # noqa: ARG002
        """How it does not hold; '' if it does."""
        found = known.value(self.tensor).detach()
        wrong = found[found != self.number]
        return f"a number of entries is {int(wrong[0])}, and {self.number} in what was proven" if wrong.numel() else ""

    def needs(self) -> tuple[Hashable, ...]:
        """The tensor."""
        return (self.tensor,)


@dataclass(frozen=True)
class Recorded:
    """What must hold in every step: an input has, in every micro-batch, the contents that it was captured with."""

    tensor: Hashable
    kind: Sample | None  # None: it has no samples
    numbers: tuple[Any, ...]
    samples: int  # of a micro-batch

    def broken(self, known: Known, samples: int) -> str:
        """How it does not hold; '' if it does."""
        found = known.value(self.tensor).detach()
        starts = range(0, samples, self.samples) if self.kind is not None else (0,)
        for start in starts:
            part = found if self.kind is None else self.kind.take(found, start, self.samples, samples)
            if tuple(part.flatten().tolist()) != self.numbers:
                return f"the Python of the model branches on an input of which samples from {start} on are others"
        return ""

    def needs(self) -> tuple[Hashable, ...]:
        """The input."""
        return (self.tensor,)


@dataclass(frozen=True)
class Repeated:
    """What must hold in every step: the Python of every micro-batch, and of the whole batch, goes the captured way."""

    def broken(self, known: Known, samples: int) -> str:  # noqa: ARG002
        """How it does not hold; '' if it does."""
        return known.other_way()

    def needs(self) -> tuple[Hashable, ...]:
        """Nothing in particular."""
        return ()


Condition = Each | Filled | Recorded | Repeated


def weigh(value: Any, weight: Any) -> Any:
    """The result of a flagged node or op in a micro-batch: times a number, or replaced by ("whole", numbers).

    ("each", weights by place) are those of several results. A micro-batch in which nothing counts has the mean nan and
    the weight 0: it adds nothing, and no gradient.
    """
    if isinstance(weight, tuple) and weight[0] == "each":
        parts = list(value)
        for place, one in weight[1]:
            parts[place] = weigh(parts[place], one)
        return type(value)(parts)
    if isinstance(weight, tuple):
        return torch.tensor(weight[1], dtype=value.dtype, device=value.device)
    if weight == 1.0:
        return value
    return value * weight if weight else _Nothing.apply(value)


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
    node_shares: dict[int, Share] = field(default_factory=dict)
    op_shares: dict[int, Share] = field(default_factory=dict)
    sizes: dict[int, dict[tuple[int, ...], int]] = field(default_factory=dict)
    numbers: tuple[int, ...] = ()  # operands that must hold 0, 1, 2 … in every step; a micro-batch has its own
    conditions: tuple[Condition, ...] = ()  # must hold in every step

    def __bool__(self) -> bool:
        return not self.reason

    def op(self, at: int, op: Op, samples: int) -> Op:
        """The op of a tape as a micro-batch of so many samples runs it."""
        form = op.form
        for path, entries in self.sizes.get(at, {}).items():
            form = _with(form, path, _range(samples) if entries == NUMBERS else Literal(entries * samples))
        return op if form is op.form else replace(op, form=form)

    def needs(self) -> tuple[Hashable, ...]:
        """The values that shares are computed from."""
        shares = (*self.node_shares.values(), *self.op_shares.values())
        keys = [key for share in shares for key in share.needs()]
        return tuple(dict.fromkeys([*keys, *(key for one in self.conditions for key in one.needs())]))

    def weights(self, known: Known, sizes: Sequence[int]) -> tuple[Mapping[int, list[Any]], Mapping[int, list[Any]]]:
        """The factors of flagged nodes and of flagged ops, one a micro-batch.

        Raises SplittingError where an operand or a mask is not what the proof relied on.
        """
        for condition in self.conditions:
            reason = condition.broken(known, sum(sizes))
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


def _with(form: Any, path: tuple[int, ...], part: Any) -> Any:
    if not path:
        return part
    items = list(form.items)
    if isinstance(form, MappingForm):
        key, old = items[path[0]]
        items[path[0]] = (key, _with(old, path[1:], part))
    elif isinstance(form, SequenceForm):
        items[path[0]] = _with(items[path[0]], path[1:], part)
    return replace(form, items=tuple(items))
