"""Call signatures: calls that one plan serves differ only in the number of samples and in contents."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from gemini.capture import torch_flags
from gemini.guards.model_version import ModelContents
from gemini.ir.autograd_modes import Region
from gemini.ir.call_binding import ModelCall
from gemini.ir.def_use import rewrite_refs
from gemini.ir.graph import Graph
from gemini.ir.pytree import Ref
from gemini.runtime.deferred.contract import OutputSpec
from gemini.runtime.pipelined.call_sizes import SizeFamily
from gemini.runtime.pipelined.measured_schedule import ScheduleTimings

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan
    from gemini.runtime.pipelined.loss_request import PreparedLoss
    from gemini.runtime.pipelined.planned_step import PlannedStep
    from gemini.runtime.pipelined.step_executor import Executor


_CHANGES = 2  # times that a plan is made again: each stops the run for seconds
_TRAINING, _TRAINED = attrgetter("training"), attrgetter("requires_grad")


def quick_key(call: ModelCall) -> tuple[Any, ...]:
    """Return the key of a kind of call while the model is in one state, whatever the number of samples."""
    tensors = tuple((one.dtype, one.device, one.requires_grad, one.dim(), _layout(one)) for one in call.tensors)
    return call.plain or repr(call.form), tensors, *_ambient_state()


def exact_key(call: ModelCall) -> Hashable | None:
    """Return a key that determines kind and number of samples while the model is in one state.

    None where the call has arguments other than tensors.
    """
    if call.metadata_key is None:
        return None
    return call.metadata_key, tuple(map(_layout, call.tensors)), *_ambient_state()


def _ambient_state() -> tuple[Any, ...]:
    """Return what a call depends on beside model and arguments: modes, torch flags, warnings that are errors."""
    return Region.current(), torch_flags.current_flags(), torch_flags.error_filters()


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the order of dimensions in memory, whatever their sizes, and which are expanded."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    return (*sorted(range(len(strides)), key=lambda at: -strides[at]), *(not stride for stride in strides))


def kind_key(roster: ModelContents, call: ModelCall) -> tuple[Any, ...]:
    """Return the key of a kind of call, whatever the number of samples."""
    _, *rest = quick_key(call)
    modes, trained = tuple(map(_TRAINING, roster.modules)), tuple(map(_TRAINED, roster.parameters))
    return repr(call.form), *rest, modes, roster.identities, trained


def differ_in_values(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether calls of two kinds have the same tensors and differ in plain values."""
    return bool(one[0] != other[0] and one[1:] == other[1:])


@dataclass
class CallKind:
    """Calls of one kind: their plan, or why there is none."""

    plan: StepPlan | None = None
    reason: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()  # of the tensors of the call it was planned for
    is_training: bool = False  # with gradients
    output_specs: dict[int, OutputSpec] = field(default_factory=dict)  # by number of samples
    steps: dict[int, PlannedStep] = field(default_factory=dict)
    executor: Executor | None = None
    shares: tuple[int, ...] = ()  # nodes at which the stages in the workers have weights
    failures: int = 0  # steps that failed in the workers
    prepared: dict[Hashable, PreparedLoss] = field(default_factory=dict)
    verified: dict[int, int] = field(default_factory=dict)  # verified steps, by identity of the `prepared`
    rerun_ms: float = 0.0  # of the longest local rerun
    # Owners of the gradients, wanted parameters, and the places of these among the owners.
    order: tuple[Sequence[torch.Tensor], list[torch.Tensor], list[int]] | None = None
    variants: list[CallKind] = field(default_factory=list)  # for other branches on random numbers
    whole_batch: CallKind | None = None  # for losses that do not split
    timings: ScheduleTimings = field(default_factory=ScheduleTimings)
    planning_ms: float = 0.0
    changes: int = 0  # times that its plan was made again
    family: SizeFamily = field(default_factory=SizeFamily)  # shared by the kinds of calls that differ in sizes alone
    reads_samples: str | None = None  # how its Python depends on the number of samples, unseen; None: not examined
    origin: CallKind | None = None  # the kind whose plan was resized to its sizes, and whose stages it runs

    @property
    def is_stale(self) -> bool:
        """Whether it was resized from a plan that has been replaced."""
        return self.origin is not None and (self.plan is None or self.origin.plan is not self.plan.resized_from)

    @property
    def may_change(self) -> bool:
        """Whether its plan could be made again from measured steps."""
        plan = self.plan
        if (
            plan is None
            or plan.tail is not None
            or plan.single_micro_batch_reason
            or plan.branches is not None
            or self.variants
            or self.origin is not None
        ):
            return False
        if plan.recompute:  # its measured backward includes a forward
            return False
        return self.changes < _CHANGES and len({block.stage for block in plan.schedule}) == plan.partition.nstages

    def change(self, plan: StepPlan) -> None:
        """Continue with another plan for the same graph."""
        self.plan, self.executor, self.order = plan, None, None
        self.prepared.clear()
        self.verified.clear()
        self.timings = ScheduleTimings()

    @property
    def is_used(self) -> bool:
        """Whether a call has come since the one it was planned for."""
        return bool(self.steps or self.prepared)

    def find_variant(self, model: nn.Module, bound: dict[str, Any], samples: int) -> CallKind | None:
        """Return the variant whose branches a call, run now, takes."""
        for one in (self, *self.variants):
            if one.plan is not None and (
                one.plan.branches is None or one.plan.branches.first_changed(model, bound, samples) is None
            ):
                return one
        return None

    def adopt_output_spec(self, others: Sequence[CallKind], samples: int) -> None:
        """Adopt the output spec of a variant with the same outputs."""
        if samples in self.output_specs or self.plan is None:
            return
        for plan, seen in [(one.plan, one.output_specs[samples]) for one in others if samples in one.output_specs]:
            if plan is not None and have_same_outputs(self.plan.graph, plan.graph):
                self.output_specs[samples] = seen
                return

    def samples(self, tensors: list[torch.Tensor]) -> int | None:
        """Return the number of samples of a call; None where its sizes differ."""
        assert self.plan is not None
        batch = self.plan.batch
        for tensor, shape, dim in zip(tensors, self.shapes, batch.dims, strict=True):
            for at, (size, wanted) in enumerate(zip(tensor.shape, shape, strict=True)):
                if at != dim and size != wanted:
                    return None
        return batch.count_samples(tensors) if any(dim is not None for dim in batch.dims) else 1


class KindMatch(NamedTuple):
    """The kind of a call, cached by its exact key."""

    kind: CallKind
    plan: StepPlan
    samples: int
    among: list[CallKind]  # all kinds of this key

    def is_valid(self) -> bool:
        """Whether the match still holds."""
        return self.kind.plan is self.plan and any(one is self.kind for one in self.among)


def have_same_outputs(one: Graph, other: Graph) -> bool:
    """Whether the outputs of two graphs have the same structure, shapes and dtypes, and share memory in the same way.

    Branches on random numbers mostly differ inside only (one layer more or less): then an output that was observed for
    one of them serves the others.
    """
    return _describe_outputs(one) == _describe_outputs(other)


def _describe_outputs(graph: Graph) -> Hashable:
    places = {ref: at for at, ref in enumerate(graph.outputs())}
    form = rewrite_refs(graph.result, lambda leaf: Ref(places[leaf]) if leaf in places else leaf)
    memory = [_memory(graph, ref.node) for ref in places]
    shared = tuple((a, b) for a in range(len(memory)) for b in range(a) if not memory[a].isdisjoint(memory[b]))
    return repr(form), tuple(_size(graph, ref) for ref in places), shared


def _size(graph: Graph, ref: Ref) -> Hashable:
    meta = graph.meta(ref)
    if meta.batch_factor == 0 or meta.strides is not None:  # growth with the batch is unknown
        return ref, id(graph)
    shape = tuple(("n", meta.batch_factor) if at == meta.batch_dim else size for at, size in enumerate(meta.shape))
    return shape, meta.dtype, meta.device, meta.requires_grad, graph.nodes[ref.node].is_source


def _memory(graph: Graph, node: int) -> set[int]:
    """Return the nodes whose memory a result may alias."""
    found, queue = set[int](), [node]
    while queue:
        at = queue.pop()
        if at not in found:
            found.add(at)
            queue += graph.nodes[at].shares
    return found
