"""Step request and result: a step as the controller requests it, and what it returns."""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from gemini.batch_analysis.batch_kinds import Kind, Partial, Replicate, SampleIndices, Shard, WeightedPartial
from gemini.ir.autograd_modes import Region
from gemini.ir.call_binding import ModelCall
from gemini.pipe.value_routes import CallerSide
from gemini.random_numbers.rng_recorder import RandomOpPattern
from gemini.runtime.devices.finalizers import call_when_freed
from gemini.runtime.pool.worker_handle import InternalFault
from gemini.step.worker_program import Loss

if TYPE_CHECKING:
    from torch import nn

    from gemini.pipe.value_routes import ValueRoutes


Patterns = tuple[tuple[RandomOpPattern, ...], ...]


class WholeTensor(NamedTuple):
    """A tensor of the whole batch, and its batch dimension; None: every micro-batch gets all of it."""

    tensor: torch.Tensor
    dim: int | Shard | SampleIndices | None


class PerMicrobatch(NamedTuple):
    """A number that differs between micro-batches."""

    values: tuple[Any, ...]


class TraceEvent(NamedTuple):
    """An action of a worker (F, B, I or W), or its wait for the inputs of one. Seconds."""

    worker: int
    kind: str
    stage: int
    mid: int
    begin: float
    end: float


class ModelStateLike(Protocol):
    """The state that a model was in when it was called."""

    def holds(self) -> bool:
        """Whether it still holds: every attribute and tensor of a module is the same object."""

    def covers(self, modules: Iterable[nn.Module]) -> bool:
        """Whether it includes these modules."""


@dataclass
class StepRequest:
    """One step.

    `inputs` are by port; `sizes` the samples of each micro-batch. `shares[micro-batch]` are the weights of reductions
    over samples in the generated stages, by their number there; `op_shares[op][micro-batch]` those of ops of the loss;
    both as `weigh` takes them. Outputs in `keep`, by port, stay in the workers until their handles are freed.
    """

    inputs: dict[str, WholeTensor | PerMicrobatch]
    sizes: tuple[int, ...]
    region: Region
    loss: Loss | None = None
    operands: dict[int, WholeTensor] = field(default_factory=dict)
    shares: Sequence[Sequence[Any]] = ()
    op_shares: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    rng_patterns: Patterns | None = None  # of each stage, at the sizes of this step; None: those of the program
    generator: bytes | Sequence[bytes] = b""  # the initial state; or one per worker
    timeout: float = 0.0
    state: ModelStateLike | None = None  # a new object after any change of the model
    # Called before the workers compute, where the memory of the gradients is known: owners, gradients.
    announce: Callable[[Sequence[nn.Parameter], list[torch.Tensor]], None] | None = None


class RemoteOutput:
    """A value that has stayed in its worker; fetched on request, released with this object."""

    def __init__(self, fetch: Callable[..., torch.Tensor], name: str) -> None:
        self._fetch, self.name = fetch, name

    def join(self, kind: Kind, weights: Sequence[float] | None = None) -> torch.Tensor:
        """Assemble the value by its batch kind; `weights` are those of a mean, one per micro-batch."""
        if isinstance(kind, Shard):
            return self._fetch(self.name, ("join", kind))
        if isinstance(kind, Replicate):
            return self.first()
        if isinstance(kind, WeightedPartial) and weights is not None:
            return self._fetch(self.name, ("sum", list(weights)))
        if isinstance(kind, Partial):
            return self.sum()
        raise InternalFault(f"a {type(kind).__name__} value cannot be assembled from micro-batches")

    def concatenate(self, dim: int) -> torch.Tensor:
        """Concatenate the parts of all micro-batches."""
        return self._fetch(self.name, ("join", Shard(dim)))

    def sum(self) -> torch.Tensor:
        """Sum the parts of all micro-batches."""
        return self._fetch(self.name, ("sum",))

    def first(self) -> torch.Tensor:
        """Return the part of the first micro-batch: all are the same."""
        return self._fetch(self.name, ("first",))


class RetainedOutputs:
    """All outputs of one step; workers release them when the last handle is freed."""

    def __init__(self, step: int, dropped: Sequence[deque[int]]) -> None:
        self.step = step
        call_when_freed(self, *(partial(one.append, step) for one in dropped))


@dataclass
class ExecutedStep:
    """The result of a step. Gradients are tensors in the memory in which workers summed them."""

    root: torch.Tensor | None
    owners: Sequence[nn.Parameter] = ()  # owners of the gradients; the same object while they do not change
    tensors: list[torch.Tensor] = field(default_factory=list)  # the gradients
    input_gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # by port
    operand_gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[str, RemoteOutput] = field(default_factory=dict)  # by port; values of the tape as '#number'
    generator: bytes = b""
    worker_traces: list[tuple[int, bytes]] = field(default_factory=list)  # encoded events of each worker

    @property
    def gradients(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Gradients by parameter."""
        return [*zip(self.owners, self.tensors, strict=True)]

    @property
    def trace(self) -> list[TraceEvent]:
        """The events of all workers."""
        return decode_events(self.worker_traces)


def decode_events(told: Sequence[tuple[int, bytes]]) -> list[TraceEvent]:
    """Decode the events of workers."""
    return [TraceEvent(place, *event) for place, events in told for event in marshal.loads(events)]


def bind_inputs(
    wiring: ValueRoutes, model: nn.Module, bound: dict[str, Any], dims: dict[int, int | None], sizes: Sequence[int],
    *, and_all: bool = False,
) -> dict[str, WholeTensor | PerMicrobatch]:  # fmt: skip
    """Return the values of all ports that a call provides; `dims` by identity of its tensors.

    `and_all`: for a number, the value of the whole batch follows those of the micro-batches.
    """
    total = sum(sizes)
    found: dict[str, WholeTensor | PerMicrobatch] = {}
    caller = CallerSide(wiring, model, bound)
    numbers = []
    for port in wiring.from_call:
        value = caller.read_port(port)
        if isinstance(value, torch.Tensor):
            dim = dims.get(id(value))
            if dim is not None and total and value.shape[dim] % total:
                raise InternalFault(
                    f"{port.name} has {value.shape[dim]} entries for {total} samples: no remainder is allowed"
                )
            found[port.name] = WholeTensor(value, dim)
        else:
            numbers.append(port)
    if numbers:  # sizes of a micro-batch differ from those of the batch
        each: dict[str, list[Any]] = {port.name: [] for port in numbers}
        start = 0
        for size in sizes:
            part = _narrow(bound, dims, start, size, total)
            one = CallerSide(wiring, model, part)
            for port in numbers:
                each[port.name].append(one.read_port(port))
            start += size
        for port in numbers if and_all else ():
            each[port.name].append(caller.read_port(port))
        found.update({name: PerMicrobatch(tuple(values)) for name, values in each.items()})
    return found


def _narrow(bound: dict[str, Any], dims: dict[int, int | None], start: int, size: int, total: int) -> dict[str, Any]:
    call = ModelCall((), bound)

    def piece(tensor: torch.Tensor) -> torch.Tensor:
        dim = dims.get(id(tensor))
        if dim is None:
            return tensor
        factor = tensor.shape[dim] // total
        return tensor.detach().narrow(dim, start * factor, size * factor)

    parts = [piece(tensor) for tensor in call.tensors]
    return call.with_tensors(parts)[1]
