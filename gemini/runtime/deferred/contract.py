"""Contract of a deferred call between the deferred step and its runner.

CallRunner    runs the call: eagerly, or pipelined with its loss and backward
OutputSpec    structure and metadata of its output, observed in an earlier call
StepResult    the values and gradients of a pipelined run
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.autograd_engine import grad_fn_name
from gemini.batch_analysis.loss_tape import Meta, Tape
from gemini.ir.encode import Encoder, UnsupportedValueError, decode
from gemini.ir.pytree import Form, Ref
from gemini.runtime.call_outcome import Eager

if TYPE_CHECKING:
    from gemini.random_numbers.host_rng import HostRandomResults
    from gemini.runtime.deferred.pending_call import PendingCall


@dataclass(frozen=True)
class OutputSpec:
    """The structure and metadata of a call's output, without its contents."""

    form: Form
    metas: tuple[Meta, ...]
    shared: tuple[frozenset[int], ...] = ()  # tensors that share memory
    nodes: tuple[str, ...] = ()  # names of the grad_fn of its tensors

    @staticmethod
    def of(output: Any) -> OutputSpec:
        """Describe an observed output; raises UnsupportedValueError where it cannot be rebuilt."""
        form, found = flatten_output(output)
        memory: dict[int, set[int]] = {}
        for at, tensor in enumerate(found):
            if tensor.layout is not torch.strided:
                raise UnsupportedValueError(f"a {tensor.layout} tensor")
            memory.setdefault(tensor.untyped_storage()._cdata, set()).add(at)
        shared = tuple(frozenset(group) for group in memory.values() if len(group) > 1)
        return OutputSpec(form, tuple(map(Meta.of, found)), shared, tuple(map(grad_fn_name, found)))

    def build(self, tensors: list[torch.Tensor]) -> Any:
        """Build the output from these tensors."""
        return decode(self.form, lambda ref: tensors[ref.node])


def flatten_output(output: Any) -> tuple[Form, list[torch.Tensor]]:
    """Return the form of an output and its distinct tensors in order."""
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
    """The result of a pipelined run. Gradients are those of the root, and belong to the receiver."""

    root: torch.Tensor
    parameters: list[torch.Tensor | None]  # in the order of CallRunner.parameters
    inputs: dict[int, torch.Tensor | None] = field(default_factory=dict)  # by place among PendingCall.inputs
    operands: dict[int, torch.Tensor | None] = field(default_factory=dict)  # by number on the tape
    kept: frozenset[int] = frozenset()  # values of the tape that workers retain
    fetch: Callable[[int], torch.Tensor] | None = None


@dataclass(kw_only=True)
class CallRunner(ABC):
    """How calls of a model run, eagerly or pipelined with their loss and backward.

    `draws`: the call consumes random numbers; `writes`: it writes buffers; `passed`: places in its output of tensors
    that the caller already has, which are returned as they are. Calls that write their arguments cannot be deferred.
    """

    model: nn.Module
    output_spec: OutputSpec
    parameters: list[torch.Tensor] = field(default_factory=list)  # those that are trained
    draws: bool = False
    writes: bool = False
    # For tapes, by hash of their signature, on which a step was run for the wrong root when a value was read early:
    # the intended root, or None where there was no single one.
    roots: dict[int, int | None] = field(default_factory=dict)
    passed: frozenset[int] = frozenset()
    modules: list[nn.Module] = field(default_factory=list)  # of the model; empty: collected in every call
    host_draws: HostRandomResults | None = (
        None  # random numbers that one call has taken from other generators than torch's
    )

    @abstractmethod
    def run_eager(self, args: Any, kwargs: Any) -> Any:
        """Run the call as the script wrote it, with autograd."""

    @abstractmethod
    def run_pipelined(self, pending: PendingCall, tape: Tape, root: int) -> StepResult | Eager:
        """Run call, tape and backward from `root` together; `Eager` where that is impossible.

        Publishes buffers and the generator's state if and only if it succeeds. After an exception, which is passed to
        `on_failure`, the call runs eagerly.
        """

    def on_failure(self, error: Exception) -> None:  # noqa: B027
        """Record that a pipelined step has failed; raises where the call must not be repeated."""

    def on_fallback(self, outcome: Eager) -> None:  # noqa: B027
        """Record that a deferred call runs eagerly."""

    def is_call_output(self, value: Any) -> bool:  # noqa: ARG002
        """Whether calls themselves assign this value to an attribute of the model."""
        return False

    def run_again(self, args: Any, kwargs: Any) -> Any:
        """`run_eager` with the random numbers that the call has already drawn."""
        if self.host_draws is None:
            return self.run_eager(args, kwargs)
        with self.host_draws.states_of_call():
            return self.run_eager(args, kwargs)
