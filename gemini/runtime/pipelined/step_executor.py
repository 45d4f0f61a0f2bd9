"""The step executor: a model's stages in workers, and steps of it by any plan.

    install    connections between workers, generated source, live stages; tensors of the model are in shared memory
    run        inputs to the workers that read them ─► all workers at once ─► loss, gradients, handles of outputs

A step is a transaction: where a stage raises or a worker fails, nothing has changed. The exception of a stage is raised
in the controller, with a note of stage, micro-batch, module and generated line.
"""

from __future__ import annotations

import functools
import itertools
import marshal
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.batch_analysis.batch_kinds import SampleIndices, Shard
from gemini.batch_analysis.microbatch_join import PARTS, combine_parts
from gemini.capture import torch_flags
from gemini.errors import InvalidPlanError
from gemini.guards.module_state import ModuleState
from gemini.ir.autograd_modes import Region
from gemini.runtime.devices.finalizers import call_when_freed
from gemini.runtime.memory.shared_layout import TensorPositions
from gemini.runtime.memory.shared_parameters import SharedParameters
from gemini.runtime.pipelined.broadcast import Broadcast
from gemini.runtime.pipelined.gradient_layout import GradientLayout, GradientOrder, sum_parts
from gemini.runtime.pipelined.peer_mesh import connect
from gemini.runtime.pipelined.shard_groups import dissolve_groups, find_groups, join_groups, sharded_stages
from gemini.runtime.pipelined.step_request import (
    ExecutedStep,
    ModelStateLike,
    Patterns,
    PerMicrobatch,
    RemoteOutput,
    RetainedOutputs,
    StepRequest,
    WholeTensor,
)
from gemini.runtime.pool.fault_policy import rebuild_with_traceback
from gemini.runtime.pool.worker_handle import InternalFault, WorkerHandle
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.protocol import Done, Raised
from gemini.runtime.step_messages import (
    ABORTED,
    AbortStep,
    Fetch,
    Fetched,
    RetirePrograms,
    Sources,
    Stages,
    Step,
    Stepped,
    Tasks,
)
from gemini.runtime.transport.code_dependencies import collect_user_objects
from gemini.runtime.transport.module_pickling import strip_uncalled_hooks
from gemini.step.lower_program import Lowered, lower
from gemini.step.worker_program import Loss, StepProgram

if TYPE_CHECKING:
    from gemini.runtime.pipelined.replicated_update import ReplicatedUpdate
    from gemini.tensor_parallel.shard_plan import ShardPlan

_TRAINING, _TRAINED = attrgetter("training"), attrgetter("requires_grad")
# Freed programs, sent to workers with the next one: objects are finalized in any thread.
_retired_programs: weakref.WeakKeyDictionary[WorkerPool, deque[int]] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)  # of programs, kinds of steps, and steps; unique in the process


class _WorkerPart:
    """The controller's view of the part of a program that one worker runs."""

    def __init__(self, program: StepProgram, place: int, stages: Sequence[nn.Module]) -> None:
        self.numbers = program.stages_of(place)
        interfaces = [program.interfaces[at] for at in self.numbers]
        self.reads = dict.fromkeys(port.name for one in interfaces for port in one.inputs if port.source is None)
        self.makes = {port.name for one in interfaces for port in one.outputs}
        self._held = [(at, list(stages[at].modules()), list(stages[at].parameters())) for at in self.numbers]
        self.known: Any = None
        self.layouts: dict[int, GradientLayout] = {}  # by kind of step

    def news(self, are_known: bool) -> Any:
        """Return training flags and frozen parameters, if the worker does not have them yet."""
        if are_known and self.known is not None:
            return None
        now = [(at, [*map(_TRAINING, modules)], [*map(_TRAINED, own)]) for at, modules, own in self._held]
        if now == self.known:
            return None
        self.known = now
        return now


class Executor:
    """Runs steps of one model by one program."""

    def __init__(
        self,
        pool: WorkerPool,
        shared_parameters: SharedParameters,
        program: StepProgram,
        follow: Callable[[], None] | None = None,
        *,
        shard_plan: ShardPlan | None = None,
        replicate: Callable[[str], None] | None = None,
    ) -> None:
        """`follow` updates the stages to the present contents of their model; a shard plan tells how they divide.

        With `replicate`, hosts optimize their own weights where they can; it logs why they cannot.
        """
        if program.nworkers > len(pool.workers):
            raise InvalidPlanError(
                f"a plan for {program.nworkers} workers, the pool has {len(pool.workers)}\n"
                "    → start as many workers, or make a plan for those there are"
            )
        self.pool, self.shared_parameters, self.program, self._follow = pool, shared_parameters, program, follow
        self.shard_plan, self._groups = shard_plan, find_groups(program)
        self.workers = pool.workers[: program.nworkers]
        self._broadcast = Broadcast(self.workers)
        self.number = next(_numbers)
        self.update: ReplicatedUpdate | None = None
        if replicate is not None:
            from gemini.runtime.pipelined import replicated_update

            self.update = replicated_update.join_replicas(self.number, program, self.workers, replicate)
            self._groups |= set() if self.update is None else {*self.update.members.values()}
        self._lowered: dict[Hashable, tuple[int, Lowered]] = {}
        self._last_kind: tuple[Loss | None, Any, tuple[int, Lowered]] | None = None
        self._parts: dict[int, _WorkerPart] = {}
        self._dropped: list[deque[int]] = [deque() for _ in self.workers]
        self._parameters: dict[int, nn.Parameter] = {}
        self._orders: dict[int, GradientOrder] = {}  # of gradients, by kind of step
        self._places: TensorPositions | None = None  # of the tensors of all stages
        self._are_replaced = False  # whether a worker on another host has new replicas
        self._known_state: ModelStateLike | None = None  # the model state that the workers have
        self._retired = _retired_programs.setdefault(pool, deque())
        call_when_freed(self, partial(self._retired.append, self.number))

    # ── installing ─────────────────────────────────────────────────────────────────────────────────────────────
    def install(self, stages: Sequence[nn.Module], texts: dict[str, str]) -> None:
        """Send the workers their stages; `texts` are the generated files by path.

        Raises InternalFault or MisplacedTensor.
        """
        self.stages, self._texts = list(stages), texts
        self._lowered.clear()
        self._orders.clear()
        self._known_state, self._places = None, None
        self._last_kind = None
        gone = [self._retired.popleft() for _ in range(len(self._retired))]
        for worker in self.pool.workers if gone else ():
            expect_done(worker, RetirePrograms(worker.next_number(), gone), "release stages")
        self._held = [
            [t for at in self.program.stages_of(w.index) for t in (*stages[at].parameters(), *stages[at].buffers())]
            for w in self.workers
        ]
        self._tensors = [*itertools.chain.from_iterable(self._held)]
        self._ensure_shared()
        self._are_replaced = False
        for worker in self.workers:
            numbers = self.program.stages_of(worker.index)
            expect_done(
                worker,
                Sources(worker.next_number(), texts, collect_user_objects(texts.values())),
                "install generated source",
            )
            modules = {at: strip_uncalled_hooks(stages[at], self.program.called) for at in numbers}
            program = self.program
            expect_done(worker, Stages(
                worker.next_number(), self.number, modules, program.interfaces, program.recompute, program.once,
                worker.index, sharded_stages(program, worker, stages, self.shard_plan, self.workers, self.number),
            ), "install stages")  # fmt: skip
        held = {id(parameter): parameter for stage in stages for parameter in stage.parameters()}
        for worker in self.workers:
            self._parameters.update(
                (worker.link.shared_numbers[key], one) for key, one in held.items() if key in worker.link.shared_numbers
            )
            self._parts[worker.index] = _WorkerPart(self.program, worker.index, self.stages)
        for worker in self.workers:
            worker.link.transport.trim()
        self._snapshots, self._moves = [ModuleState(stage) for stage in stages], self.shared_parameters.relocations

    def _ensure_shared(self, *, have_shapes: bool = False) -> None:
        """Ensure that all tensors are in memory that workers see; `have_shapes`: their shapes have not changed."""
        if self._places is not None and self._places.hold(have_shapes=have_shapes):
            return
        for worker, held in zip(self.workers, self._held, strict=True):
            has_new = worker.ensure_stages_shared(self.number, held, self.shared_parameters)
            self._are_replaced |= has_new and worker.is_remote
        self._places = TensorPositions(self._tensors)

    def _refresh_stages(self, state: ModelStateLike | None) -> bool:
        """Send the stages again where the script has changed them: a tensor that has moved, an attribute.

        Returns whether the workers already know the state of the model.
        """
        is_known = state is not None and state is self._known_state
        if not is_known and self._follow is not None:
            self._follow()
        self._ensure_shared(have_shapes=is_known)
        if (
            self._are_replaced
            or self._moves != self.shared_parameters.relocations
            or any(snapshot.find_change(is_known) for snapshot in self._snapshots)
        ):
            self.install(self.stages, self._texts)
            is_known = False
        if not is_known:
            modules = (module for snapshot in self._snapshots for module in snapshot.modules)
            self._known_state = state if state is not None and state.holds() and state.covers(modules) else None
        return is_known

    def _kind(self, loss: Loss | None, rng_patterns: Patterns | None) -> tuple[int, Lowered]:
        """Return the tasks of steps with such a loss, or of evaluation without one; they are sent once."""
        last = self._last_kind
        if last is not None and last[0] is loss and last[1] is rng_patterns:  # identity
            return last[2]
        patterns = self.program.rng_patterns if rng_patterns is None else rng_patterns
        key = None if loss is None else loss.signature(), patterns
        if key not in self._lowered:
            program = self.program if loss is not None or not self.program.is_training else self.program.forward_only()
            lowered = lower(program, loss)
            connect(self.pool, lowered.edges())
            number = next(_numbers)
            for worker in self.workers:
                tasks = lowered.tasks[worker.index]
                expect_done(worker, Tasks(
                    worker.next_number(), number, self.number, worker.index, tasks, lowered.readers, loss,
                    lowered.loss_stage, lowered.frozen, lowered.tail, patterns,
                    () if self.update is None or loss is None else self.update.members[worker.index],
                ), "install a plan")  # fmt: skip
            self._lowered[key] = number, lowered
        self._last_kind = loss, rng_patterns, self._lowered[key]
        return self._lowered[key]

    def _check_frozen(self) -> None:
        """Raise where a stage without a backward trains parameters."""
        without = self.program.frozen - self.program.detached
        wrong = [at for at in without if any(p.requires_grad for p in self.stages[at].parameters())]
        if wrong:
            raise InvalidPlanError(
                f"stages {wrong} train parameters, and have no backward in the plan\n"
                "    → freeze their parameters (requires_grad_(False)), or use a plan with their backward"
            )

    # ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────
    def run(self, request: StepRequest) -> ExecutedStep:
        """Run a step on all workers. Raises the exception of a stage, InternalFault or WorkerError."""
        if len(request.sizes) != self.program.micro_batches:
            raise InvalidPlanError(
                f"a plan for {self.program.micro_batches} micro-batches, the step has {len(request.sizes)}\n"
                "    → make a plan for as many micro-batches"
            )
        if request.loss is not None:
            self._check_frozen()
        is_known = self._refresh_stages(request.state)
        kind, step = self._kind(request.loss, request.rng_patterns), next(_numbers)
        join_groups(self.pool, self._groups, of_shards=self.shard_plan is not None)
        region = _encode_region(request.region)
        if self.update is not None:
            self.update.compare_weights()
        requests = {worker: self._request(worker, request, kind, step, region, is_known) for worker in self.workers}
        self._announce_gradients(kind[0], request)
        try:
            replies = self._broadcast.ask(
                requests, "run a step", lambda reply: not isinstance(reply, Stepped),
                lambda number: AbortStep(number, step), request.timeout,
            )  # fmt: skip
            self._check(replies)
            sums = None
            if self.update is not None and request.loss is not None:
                sums = self.update.sum_gradients(kind[0], step, request.timeout)
        except BaseException:
            dissolve_groups(self.pool)
            raise
        # In the order of the workers, not of their replies: sums over workers are deterministic.
        result = self._result({worker: replies[worker] for worker in self.workers}, request, kind[0], step, sums)
        if self.update is not None and sums is not None:
            self.update.deliver(result.owners, result.tensors)
        return result

    def _request(  # noqa: PLR0917
        self,
        worker: WorkerHandle,
        request: StepRequest,
        kind: tuple[int, Lowered],
        step: int,
        region: Any,
        is_known: bool,
    ) -> Step:
        """Build the step for one worker: only the values that its stages read."""
        part, (key, lowered) = self._parts[worker.index], kind
        worker.link.transport.release_borrowed()
        inputs, numbers, operands = [], [], []
        tensors: list[torch.Tensor] = []
        for name in part.reads:
            value = request.inputs[name]
            if isinstance(value, PerMicrobatch):
                numbers.append((name, list(value.values)))
            else:
                inputs.append((name, _plain_dim(value.dim), len(tensors)))
                tensors.append(value.tensor)
        if request.loss is not None and lowered.loss_stage in part.numbers:
            for number in request.loss.operands:
                whole: WholeTensor = request.operands[number]
                operands.append((number, _plain_dim(whole.dim), len(tensors)))
                tensors.append(whole.tensor)
        shares = [list(each) for each in request.shares]
        op_shares = {at: list(each) for at, each in request.op_shares.items()}
        dropped = self._dropped[worker.index]
        return Step(
            worker.next_number(), step, key, region, part.news(is_known), tuple(request.sizes),
            inputs, numbers, operands, shares, op_shares, [name for name in request.keep if name in part.makes],
            _select_rng_state(request.generator, worker.index), [dropped.popleft() for _ in range(len(dropped))],
            part.layouts[key].number if key in part.layouts else 0, tensors,
        )  # fmt: skip

    def _check(self, replies: dict[WorkerHandle, Any]) -> None:
        """Raise the first failure: the exception of a stage before its consequences."""
        failed = {worker: reply for worker, reply in replies.items() if not isinstance(reply, Stepped)}
        if not failed:
            return
        for part in self._parts.values():
            part.known = None
        self._known_state = None
        for worker, reply in failed.items():
            if isinstance(reply, Raised):
                text = f"in worker {worker.index}, {reply.scope}"
                raise rebuild_with_traceback(reply, text)
        for worker, reply in failed.items():
            worker.check_reply(reply, "a step")
            if reply is not None and getattr(reply, "reason", "") != ABORTED:
                raise InternalFault(f"a step in worker {worker.index}: {getattr(reply, 'reason', reply)!s:.2000}")
        raise InternalFault("the step was interrupted")

    def _announce_gradients(self, kind: int, request: StepRequest) -> None:
        """Announce the gradients of this step, if they will lie where they did in the last one.

        Done while the objects are in the CPU caches: after the step, which evicts them, it takes three times as long.
        """
        order, gradients = self._orders.get(kind), list[torch.Tensor]()
        if request.announce is None or order is None or order.has_sums:
            return
        for worker, layout in zip(self.workers, order.layouts, strict=True):
            is_latest = self._parts[worker.index].layouts.get(kind) is layout
            found = worker.link.transport.prepare(layout.row) if is_latest else None
            if found is None:
                return
            gradients += found
        request.announce(order.owners, gradients)

    # ── results ───────────────────────────────────────────────────────────────────────────────────────────
    def _gradients(self, worker: WorkerHandle, reply: Stepped, kind: int) -> tuple[GradientLayout, list[torch.Tensor]]:
        """Return the gradients of one worker, in its memory."""
        layouts = self._parts[worker.index].layouts
        if reply.gradients is not None:
            layouts[kind] = GradientLayout(reply.layout, reply.gradients)
        return layouts[kind], worker.link.transport.borrow(layouts[kind].row)

    def _result(
        self, replies: dict[WorkerHandle, Any], request: StepRequest, kind: int, step: int,
        sums: dict[WorkerHandle, dict[Any, torch.Tensor]] | None,
    ) -> ExecutedStep:  # fmt: skip
        layouts: list[GradientLayout] = []
        loose: list[list[tuple[int, int]]] = []
        gradients: list[torch.Tensor] = []
        given: dict[str, list[tuple[int, torch.Tensor]]] = {}
        result = ExecutedStep(None)
        for worker, reply in replies.items():
            rest = iter(reply.tensors)
            layout, opened = self._gradients(worker, reply, kind)
            layouts.append(layout)
            gradients += opened
            sent = worker.pop_gradients(step) | (sums[worker] if sums is not None else {})
            sent |= {(home, latest): next(rest) for home, latest in reply.loose}  # a second one counts
            loose.append([*sent])
            gradients += sent.values()
            if reply.has_root:
                part = next(rest)
                result.root = part if result.root is None else result.root + part
            for name, stage in reply.given:
                given.setdefault(name, []).append((stage, next(rest)))
            for number in reply.operands:  # replicas have a part of it each
                found, part = result.operand_gradients.get(number), next(rest)
                result.operand_gradients[number] = part if found is None else found + part
            result.generator = reply.generator or result.generator
            result.worker_traces.append((worker.index, _shift_times(reply.trace, worker.clock_offset)))
        order = self._order(kind, layouts, loose, request)
        result.owners, result.tensors = order.owners, order.by_owner(gradients)
        result.input_gradients = {name: sum_parts(found) for name, found in given.items()}
        self._keep_outputs(result, request, step)
        return result

    def _order(
        self, kind: int, layouts: list[GradientLayout], loose: list[list[tuple[int, int]]], request: StepRequest
    ) -> GradientOrder:
        """Return the parameters of the gradients."""
        known = self._orders.get(kind)
        if known is not None and known.layouts == layouts and not any(loose):
            return known
        made = GradientOrder(layouts, loose, self._parameters | self._loss_parameters(request))
        if not any(loose):
            self._orders[kind] = made
        return made

    def _loss_parameters(self, request: StepRequest) -> dict[int, Any]:
        """Return parameters of other models that the loss uses."""
        tensors = [whole.tensor for whole in request.operands.values()]
        held = [(worker.link.shared_numbers.get(id(tensor)), tensor) for worker in self.workers for tensor in tensors]
        return {number: tensor for number, tensor in held if number is not None}

    def _keep_outputs(self, result: ExecutedStep, request: StepRequest, step: int) -> None:
        loss = request.loss
        names = [*request.keep, *(f"#{number}" for number in (loss.keep if loss is not None else ()))]
        if not names:
            return
        stay, loss_stage = RetainedOutputs(step, self._dropped), self._kind(loss, request.rng_patterns)[1].loss_stage

        def fetch(name: str, how: tuple[Any, ...], stay: RetainedOutputs = stay) -> torch.Tensor:
            return self._fetch(stay.step, name, how, self._find_places(name, loss_stage))

        result.outputs = {name: RemoteOutput(fetch, name) for name in names}

    def _fetch(self, step: int, name: str, how: tuple[Any, ...], places: list[int]) -> torch.Tensor:
        """Fetch a value from its worker; parts in several workers are combined."""
        parts: dict[int, torch.Tensor] = {}
        for place in places:
            worker = self.workers[place]
            asked = Fetch(worker.next_number(), step, name, how if len(places) == 1 else PARTS)
            reply = worker.ask(asked, f"fetch {name}")
            if not isinstance(reply, Fetched):
                raise InternalFault(f"{name} cannot be fetched: {getattr(reply, 'reason', reply)!s:.500}")
            parts.update(zip(reply.mids, reply.tensors, strict=False))
        found = [parts[mid] for mid in sorted(parts)]
        return found[0] if len(places) == 1 else combine_parts(found, how)

    def _find_places(self, name: str, loss_stage: int) -> list[int]:
        """Return the workers that hold a value: for one of the tape, those that ran the loss of that step."""
        if name.startswith("#"):
            stages = {loss_stage}
        else:
            stages = {e.stage for e in self.program.interfaces for port in e.outputs if port.name == name}
        return sorted({places[0] for (stage, _), places in self.program.where.items() if stage in stages})


def _shift_times(trace: bytes, seconds: float) -> bytes:
    """Return marshalled events in the clock of this process."""
    if not seconds:
        return trace
    events = marshal.loads(trace)
    return marshal.dumps([(kind, at, mid, begin + seconds, end + seconds) for kind, at, mid, begin, end in events])


@functools.lru_cache(maxsize=256)
def _plain_dim(dim: Any) -> Any:
    """Return a batch layout as plain data."""
    return astuple(dim) if isinstance(dim, (Shard, SampleIndices)) else dim


def _select_rng_state(generator: bytes | Sequence[bytes], place: int) -> bytes:
    return generator if isinstance(generator, bytes) else generator[place]


def _encode_region(region: Region) -> Any:
    """Return a region and the torch flags as plain data."""
    return region.grad, region.inference, region.autocast, torch_flags.current_flags()


def expect_done(worker: WorkerHandle, request: Any, what: str) -> None:
    """Send a request that is answered by Done."""
    reply = worker.ask(request, what)
    if not isinstance(reply, Done):
        raise InternalFault(f"worker {worker.index}: {getattr(reply, 'reason', reply)!s:.2000}")
