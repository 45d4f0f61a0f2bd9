"""Work: what the controller must say of a call before it may be put off, and what a run of it gives back.

Work          how the call can be run: eagerly, or overlapped with its loss and backward
Outline       what its output will look like: structure and metadata, as seen in an earlier call
StepResult    what an overlapped run has computed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.batch_analysis.loss_tape import Meta, Tape
from gemini.ir.encode import Encoder, UnsupportedValueError, decode
from gemini.ir.pytree import Form, Ref
from gemini.runtime.grad_fn_names import grad_fn_name

if TYPE_CHECKING:
    from gemini.random_numbers.host_rng import ForeignDraws
    from gemini.runtime.deferred.pending_call import Pending


@dataclass(frozen=True)
class Outline:
    """The output of a call without its contents."""

    form: Form
    metas: tuple[Meta, ...]
    shared: tuple[frozenset[int], ...] = ()  # tensors of it that share memory
    nodes: tuple[str, ...] = ()  # names of what has made its tensors

    @staticmethod
    def of(output: Any) -> Outline:
        """Of an output that was seen; raises UnsupportedValueError where it cannot be made again."""
        form, found = taken_apart(output)
        memory: dict[int, set[int]] = {}
        for at, tensor in enumerate(found):
            if tensor.layout is not torch.strided:
                raise UnsupportedValueError(f"a {tensor.layout} tensor")
            memory.setdefault(tensor.untyped_storage()._cdata, set()).add(at)
        shared = tuple(frozenset(group) for group in memory.values() if len(group) > 1)
        return Outline(form, tuple(map(Meta.of, found)), shared, tuple(map(grad_fn_name, found)))

    def build(self, tensors: list[torch.Tensor]) -> Any:
        """The output with these tensors."""
        return decode(self.form, lambda ref: tensors[ref.node])


def taken_apart(output: Any) -> tuple[Form, list[torch.Tensor]]:
    """The form of an output, and its tensors in order; the same tensor in two places is one."""
    found: list[torch.Tensor] = []
    place: dict[int, int] = {}

    def collect(tensor: torch.Tensor) -> Ref:
        at = place.setdefault(id(tensor), len(found))
        if at == len(found):
            found.append(tensor)
        return Ref(at)

    return Encoder(collect, lambda _: None)(output), found


@dataclass
class StepResult:
    """What an overlapped run has computed. Gradients are of the root, and belong to whoever takes them."""

    root: torch.Tensor
    parameters: list[torch.Tensor | None]  # in the order of Work.parameters
    inputs: dict[int, torch.Tensor | None] = field(default_factory=dict)  # by place among Pending.inputs
    operands: dict[int, torch.Tensor | None] = field(default_factory=dict)  # by number on the tape
    kept: frozenset[int] = frozenset()  # values of the tape that can be fetched
    fetch: Callable[[int], torch.Tensor] | None = None


def _nothing(error: Exception) -> None:
    """Nobody wants to know."""


def _not_left(value: Any) -> bool:  # noqa: ARG001
    """Calls leave nothing."""
    return False


def _unnoticed() -> None:
    """Nobody counts."""


@dataclass
class Work:
    """How calls of a model can be run.

    `eager(args, kwargs)` is the call as the program wrote it, with autograd. `overlapped(pending, tape, root)` runs
    call, tape and backward from `root` together; None: it cannot. It publishes buffers and the generator's state
    when, and only when, it succeeds; an exception is told to `failed`, and the call is made eagerly.

    `draws`: the call takes random numbers; `writes`: it writes to buffers; `passed`: places in its output of what the
    program has already, which it gets back as it is. Calls that write to their arguments are not to be put off.
    """

    model: nn.Module
    outline: Outline
    eager: Callable[[Any, Any], Any]
    overlapped: Callable[[Pending, Tape, int], StepResult | None]
    parameters: list[torch.Tensor] = field(default_factory=list)  # those that are trained
    draws: bool = False
    writes: bool = False
    failed: Callable[[Exception], None] = _nothing
    forced: Callable[[], None] = _unnoticed  # a call is made eagerly before it was known what its step is
    # For tapes, by hash of their signature, on which a step was run for the wrong root when a value was read early:
    # the root that was meant, or None where there was no single one.
    roots: dict[int, int | None] = field(default_factory=dict)
    passed: frozenset[int] = frozenset()
    modules: list[nn.Module] = field(default_factory=list)  # of the model; none: they are looked up in every call
    has_left: Callable[[Any], bool] = _not_left  # whether calls themselves leave this in an attribute of the model
    foreign: ForeignDraws | None = None  # what one call has drawn from other generators than torch's

    def drawn(self, foreign: ForeignDraws) -> Work:
        """For one call, which has drawn already: made eagerly, it draws the same again."""

        def eager(args: Any, kwargs: Any) -> Any:
            with foreign.as_then():
                return self.eager(args, kwargs)

        return replace(self, eager=eager, foreign=foreign)
