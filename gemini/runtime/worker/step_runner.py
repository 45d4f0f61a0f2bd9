"""Step runner: runs the tasks of a worker in one step, each as soon as its inputs have arrived.

    F   leaves ─► stage ─► outputs, sent immediately ─► [loss]
    B   gradients of outputs ─► autograd ─► gradients of inputs, sent immediately ─► weight gradients
    I   the same without the weight gradients, which wait for W

A backward leaves weight gradients in the store and sends what an earlier stage waits for before it computes them, so a
whole backward is I and W in one, too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from typing import Any, NamedTuple

import torch

from gemini.autograd_engine import accumulate
from gemini.batch_analysis.tape_interpreter import OpRaised, run_ops
from gemini.collectives.shard_group import CollectiveMismatchError, ShardGroup, use_group
from gemini.ir.autograd_modes import Region
from gemini.random_numbers.rng_state import get_state, set_state
from gemini.random_numbers.sliced_rng import RandomOpsDiffer, SlicedRandomOps
from gemini.runtime.protocol import GradientBucket
from gemini.runtime.step_messages import PeerMessage, Step, Stepped
from gemini.runtime.transport.channel import ChannelClosed
from gemini.runtime.worker.gradient_buffers import GradientBuffers, LooseGradients
from gemini.runtime.worker.gradient_stream import StreamedGradients
from gemini.runtime.worker.microbatch_inputs import MicrobatchInputs
from gemini.runtime.worker.p2p import PeerLinks, StepAborted
from gemini.runtime.worker.program_state import InstalledProgram, WorkerPlan
from gemini.runtime.worker.side_effect_check import Refusal
from gemini.runtime.worker.stage_state import LiveStage, MicrobatchGraph, graph_edge, save_nothing
from gemini.runtime.worker.step_reply import build_reply
from gemini.runtime.worker.value_mailbox import ValueMailbox
from gemini.runtime.worker.whole_batch_stage import run_tail
from gemini.schedule.block import FORWARD, LETTERS, WEIGHT_GRADIENT
from gemini.step.delayed_weight_grads import STORE, DelayedGrad, ImmediateQueue, run_delayed
from gemini.step.lower_program import LOSS, TAIL, Task


class StageRaised(Exception):
    """User code of a stage, or of the loss, raised."""

    def __init__(self, error: BaseException, task: Task, stage: LiveStage, what: str = "") -> None:
        super().__init__(error)
        self.error, self.task, self.stage, self.what = error, task, stage, what


class StepBackup(NamedTuple):
    """The state before a step: buffers, and the gradient buffers to free."""

    buffers: list[tuple[LiveStage, list[tuple[int, torch.Tensor]]]]
    gradients: GradientBuffers | LooseGradients

    def restore(self) -> None:
        """Restore it."""
        for stage, saved in self.buffers:
            stage.buffers.restore(saved)
        self.gradients.discard()


class StepRunner:
    """One step in one worker."""

    def __init__(
        self,
        plan: WorkerPlan,
        request: Step,
        peers: PeerLinks,
        control: Any,
        groups: Mapping[tuple[int, ...], ShardGroup],
    ) -> None:
        self.plan, self.request, self.peers, self.control, self.groups = plan, request, peers, control, groups
        self.program: InstalledProgram = plan.program
        self.device = control.transport.device
        self.mailbox = ValueMailbox(plan.local_readers)
        self.inputs = MicrobatchInputs(request.inputs, request.numbers, request.tensors, request.sizes)
        self.operands = MicrobatchInputs(request.operands, [], request.tensors, request.sizes)
        self.shards_gather = self.program.shards is not None and self.program.shards.are_remote
        shares = control.transport.shares_memory and not self.shards_gather
        self.gradients: GradientBuffers | LooseGradients
        if shares:
            self.gradients = GradientBuffers(control, plan.places, plan.group_gradients())
        elif self.program.shards is not None or plan.members:
            self.gradients = LooseGradients(self.program.parameters)
        else:
            self.gradients = StreamedGradients(self.program.parameters, plan.gradient_parts, self._send_bucket)
        self.graphs: dict[tuple[int, int], MicrobatchGraph] = {}
        self.delayed: dict[
            tuple[int, int], deque[DelayedGrad]
        ] = {}  # delayed weight gradients, by stage and micro-batch
        self.input_gradients: dict[tuple[str, int], dict[int, torch.Tensor | None]] = {}  # by port and stage
        self.outputs: dict[str, dict[int, Any]] = {name: {} for name in request.keep if plan.reports_output(name)}
        self.root: torch.Tensor | None = None
        self.saved: dict[int, list[tuple[int, torch.Tensor]]] = {}  # buffers of each stage
        self.trace: list[tuple[str, int, int, float, float]] = []
        self.sliced_rng: dict[int, SlicedRandomOps] = {}
        self.rng_states: dict[int, bytes] = {}  # generator states after a stage
        *region, self.flags = request.region
        self.region = Region(*region)
        self.records = self.region.grad and plan.is_training

    # ── the step ───────────────────────────────────────────────────────────────────────────────────────────────
    def run(self) -> Stepped:
        """Carry out all tasks; whatever is raised, `undo` restores the state."""
        if self.request.generator:
            set_state(self.request.generator, self.device)
        self.peers.begin(self.request.step, self.mailbox.take)
        if self.program.shards is not None:
            self.program.shards.begin(self.groups)
            if self.gradients.group is not None and self.records:
                self.gradients.group.begin(self.request.step, self.peers, self.control, self.mailbox)
        self.saved = {number: stage.buffers.save() for number, stage in self.plan.stages.items()}
        for task in self.plan.tasks:
            if task.kind == FORWARD:
                self._forward(task)
            elif task.kind == WEIGHT_GRADIENT:
                self._weight_gradients(task)
            elif task.kind == TAIL:
                run_tail(self, task)
            else:
                self._backward(task)
            self.peers.release_slabs()
        for number, stage in self.plan.stages.items():
            stage.check(self.saved[number])
        return build_reply(self)

    def before(self) -> StepBackup:
        """Return what is needed to undo the step, without anything computed in it."""
        return StepBackup([(self.plan.stages[at], saved) for at, saved in self.saved.items()], self.gradients)

    def undo(self) -> None:
        """Restore the state before the step."""
        self.before().restore()
        for parameter in self.program.parameters:
            parameter.grad = None
        self.graphs.clear()
        self.delayed.clear()

    def wait_until(self, ready: Any, task: Task) -> float:
        """Wait until a condition holds; return the time when it does."""
        begin = time.perf_counter()
        self.peers.receive(0)
        if ready():
            return begin
        while not ready():
            self.peers.receive()
        end = time.perf_counter()
        self.trace.append(("wait", task.stage, task.mid, begin, end))
        return end

    # ── forward ────────────────────────────────────────────────────────────────────────────────────────────────
    def _forward(self, task: Task) -> None:
        stage, mid = self.plan.stages[task.stage], task.mid
        ports = [port for port in stage.interface.inputs if port.source is not None]
        values = self.mailbox.values
        begin = self.wait_until(
            lambda: all((port.name, mid) in values for port in ports) and self.has_state(task.stage), task
        )
        given = [
            self.inputs.piece(port.name, mid) if port.source is None else self.mailbox.pop(port.name, mid)
            for port in stage.interface.inputs
        ]
        graph = MicrobatchGraph()
        again = self.records and task.stage in self.program.recompute and not task.has_loss
        made = self.run_stage(task, stage, given, graph, saves=not again)
        self._distribute(task, made)
        if task.has_loss:
            self._loss(task, stage, made, graph)
        if again:
            graph.given, graph.edges, graph.leaves = given, dict.fromkeys(graph.edges), {}
        if task.stage in self.plan.frozen:
            if graph.edges:
                raise Refusal(f"stage {task.stage} has no backward in the plan, and gradients should pass it")
        elif self.records:
            self.graphs[task.stage, mid] = graph
        self.trace.append(("F", task.stage, mid, begin, time.perf_counter()))

    def run_stage(
        self, task: Task, stage: LiveStage, given: list[Any], graph: MicrobatchGraph, saves: bool
    ) -> dict[str, Any]:
        """Run the forward of a stage on one micro-batch; `saves`: retain its graph."""
        if self.request.shares:
            stage.set_shares(self.request.shares[task.mid])
        if self.program.once and self.program.once[task.stage]:  # written once per step, not per micro-batch
            once = self.program.once[task.stage]
            stage.buffers.restore([(at, before) for at, before in self.saved[task.stage] if at in once])
        with ExitStack() as stack:
            self.region.enter(stack, Region.current())
            group = self.group_of(task.stage)
            stack.enter_context(use_group(group))
            if self.program.shards is not None:
                stack.enter_context(self.program.shards.check_forward(task.stage, group))
            if self.records:
                stack.enter_context(STORE.activate())
                if not saves:
                    stack.enter_context(save_nothing())
            try:
                if self._random_ops(task.stage):
                    return self._forward_with_rng(task, stage, given, graph)
                return stage.forward(given, graph)
            except (Refusal, RandomOpsDiffer, StepAborted, CollectiveMismatchError):
                raise
            except BaseException as error:
                raise StageRaised(error, task, stage) from error

    def group_of(self, stage: int) -> ShardGroup | None:
        """Return the group of shards that run a stage; None for a stage with a single one."""
        shards = self.program.shards
        return None if shards is None or stage not in shards.members else self.groups[shards.members[stage]]

    def _distribute(self, task: Task, made: dict[str, Any]) -> None:
        """Send outputs, store them for local readers, and retain those that may be fetched."""
        for peer, names in task.sends:
            values = [made[name] for name in names]
            tensors = [value if isinstance(value, torch.Tensor) else None for value in values]
            numbers = [None if isinstance(value, torch.Tensor) else value for value in values]
            self.peers.send(
                peer, PeerMessage(self.request.step, "value", task.mid, list(zip(names, numbers)), b"", tensors)
            )
        for name, value in made.items():
            if isinstance(value, torch.Tensor):
                plain = value.detach()
                if name in self.outputs:
                    self.outputs[name][task.mid] = plain
                value = plain.requires_grad_() if value.requires_grad else plain
            elif name in self.outputs:
                self.outputs[name][task.mid] = value
            self.mailbox.put(name, task.mid, value)
        for peer in task.state_to:
            self._send_state(peer, task.stage)

    # ── random numbers ─────────────────────────────────────────────────────────────────────────────────────────
    def _random_ops(self, stage: int) -> Any:
        return self.plan.draws[stage] if self.plan.draws else ()

    def has_state(self, stage: int) -> bool:
        """Return whether the generator state has arrived, if a stage must wait for it."""
        drawing = self.plan.drawing
        if stage not in drawing or stage == drawing[0] or stage in self.sliced_rng:
            return True
        return stage in self.mailbox.states

    def _forward_with_rng(
        self, task: Task, stage: LiveStage, given: list[Any], graph: MicrobatchGraph
    ) -> dict[str, Any]:
        """Run a forward that draws random numbers: for the whole batch the first time, from the last stage's state."""
        first = task.stage not in self.sliced_rng
        if first:
            state = self.mailbox.states.get(task.stage, self.request.generator)
            if state:
                set_state(state, self.device)
            group = self.group_of(task.stage)
            shard = (0, 1) if group is None else (group.rank, group.size)
            self.sliced_rng[task.stage] = SlicedRandomOps(self._random_ops(task.stage), self.inputs.total, shard)
        where = self.inputs.starts[task.mid], self.inputs.sizes[task.mid]
        with self.sliced_rng[task.stage].micro_batch(*((0, self.inputs.total) if task.kind == TAIL else where)):
            made = stage.forward(given, graph)
        if first:
            self.rng_states[task.stage] = get_state(self.device)
        return made

    def _send_state(self, peer: int, stage: int) -> None:
        following = self.plan.drawing[self.plan.drawing.index(stage) + 1]
        if peer == self.plan.place:
            self.mailbox.states[following] = self.rng_states[stage]
        else:
            self.peers.send(peer, PeerMessage(self.request.step, "state", following, [], self.rng_states[stage], []))

    # ── the loss ───────────────────────────────────────────────────────────────────────────────────────────────
    def _loss(self, task: Task, stage: LiveStage, made: dict[str, Any], graph: MicrobatchGraph) -> None:
        loss = self.plan.loss
        read = loss.reads()
        others = {number: name for number, name in loss.ports.items() if number in read and name not in made}
        self.wait_until(lambda: all((name, task.mid) in self.mailbox.values for name in others.values()), task)
        values = {number: made[name] for number, name in loss.ports.items() if name in made and number in read}
        leaves: dict[str, Any] = {}
        for number, name in others.items():
            if name not in leaves:
                leaves[name] = self.make_leaf(self.mailbox.pop(name, task.mid), name, graph)
            values[number] = leaves[name]
        self.run_loss_tape(task, stage, values, graph)

    def run_loss_tape(self, task: Task, stage: LiveStage, values: dict[int, Any], graph: MicrobatchGraph) -> None:
        """Run the tape on outputs of the model; its root is where the backward begins."""
        loss = self.plan.loss
        for number in {op.writes for op in loss.ops if op.writes in values}:
            values[number] = values[number].clone()  # other readers need the model's output unchanged
        with torch.set_grad_enabled(self.records), STORE.activate():
            for number in loss.operands:
                values[number] = self._operand(number, task.mid)
            shares = {at: each[task.mid] for at, each in self.request.op_shares.items()}
            try:
                run_ops(enumerate(loss.ops_for(self.request.sizes[task.mid])), values, weights=shares)
            except OpRaised as raised:
                raise StageRaised(raised.error, task, stage, f"{raised.op} of the loss") from raised.error
        root = values[loss.root]
        self.root = root.detach().clone() if self.root is None else self.root + root.detach()
        if self.records and root.requires_grad:
            graph.root, graph.root_like = graph_edge(root), root.detach()
        for number in loss.keep if self.plan.reports(task.stage) else ():
            self.outputs.setdefault(f"#{number}", {})[task.mid] = values[number].detach()

    def make_leaf(self, value: Any, name: str, graph: MicrobatchGraph) -> Any:
        """Return a leaf for a value that the loss reads, if it requires a gradient."""
        if isinstance(value, torch.Tensor) and value.requires_grad and self.records:
            leaf = graph.leaves[name, LOSS] = value.detach().requires_grad_()
            return leaf
        return value

    def _operand(self, number: int, mid: int) -> Any:
        """Return an operand; one that requires a gradient, such as a parameter, accumulates it over micro-batches."""
        return self.operands.part(number, mid)

    # ── backward ───────────────────────────────────────────────────────────────────────────────────────────────
    def _remote_readers(self, task: Task, name: str) -> tuple[int, ...]:
        """Return the readers whose gradients arrive as messages: the loss of this stage is in its own graph."""
        readers = self.plan.readers[name].stages
        own = task.stage == self.plan.loss_stage and self.plan.tail is None
        local = (*self.plan.frozen, *((LOSS,) if own else ()))
        return tuple(one for one in readers if one not in local)

    def _backward(self, task: Task) -> None:
        stage, mid = self.plan.stages[task.stage], task.mid
        graph = self.graphs.pop((task.stage, mid))
        awaited = [(name, self._remote_readers(task, name)) for name in graph.edges]
        mailbox = self.mailbox
        begin = self.wait_until(lambda: all(mailbox.has_gradients(name, mid, who) for name, who in awaited), task)
        if graph.given is not None:
            self._recompute(task, stage, graph)
        roots = [(graph.edges[name], mailbox.pop_gradient(name, mid)) for name, _ in awaited]
        roots = [root for root in roots if root[1] is not None]
        if graph.root is not None:
            roots.insert(0, (graph.root, torch.ones_like(graph.root_like)))
        letter = LETTERS[task.kind]
        queue: deque[DelayedGrad] = ImmediateQueue(self.gradients) if letter == "B" and not task.sends else deque()
        if roots:
            self.run_backward(task, stage, roots, queue)
        self._send_gradients(task, graph)
        if letter == "B":
            run_delayed(queue, self.gradients)
        else:
            self.delayed[task.stage, mid] = queue
        self.gradients.adopt(stage.parameters)
        self.trace.append((letter, task.stage, mid, begin, time.perf_counter()))

    def run_backward(self, task: Task, stage: LiveStage, roots: list[Any], queue: deque[DelayedGrad]) -> None:
        """Run autograd from the roots; weight gradients go to `queue`."""
        drawn = self.sliced_rng.get(task.stage) if task.kind != TAIL or self.plan.tail.stage is not None else None
        try:
            drawing = drawn.recompute() if drawn is not None else nullcontext()
            group, shards = self.group_of(task.stage), self.program.shards
            checking = nullcontext() if shards is None else shards.check_backward(task.stage, group)
            with STORE.collect_into(queue), drawing, use_group(group), checking:
                accumulate([edge for edge, _ in roots], [gradient for _, gradient in roots])
        except (RandomOpsDiffer, StepAborted, CollectiveMismatchError):
            raise
        except BaseException as error:
            raise StageRaised(error, task, stage) from error

    def _recompute(self, task: Task, stage: LiveStage, graph: MicrobatchGraph) -> None:
        """Run the forward again, with its graph; buffers were written the first time."""
        given, graph.given = graph.given or [], None
        saved = stage.buffers.save()
        graph.edges = {}
        self.run_stage(task, stage, given, graph, saves=True)
        stage.buffers.restore(saved)

    def _send_gradients(self, task: Task, graph: MicrobatchGraph) -> None:
        parts: dict[str, list[tuple[int, torch.Tensor | None]]] = {}
        for (name, reader), leaf in graph.leaves.items():
            parts.setdefault(name, []).append((reader, leaf.grad))
        sent: set[str] = set()
        for peer, names in task.sends:
            found = [(name, reader, grad) for name in names for reader, grad in parts.get(name, ())]
            sent.update(name for name, _, _ in found)
            if found:
                keys, tensors = [(name, reader) for name, reader, _ in found], [grad for _, _, grad in found]
                self.peers.send(peer, PeerMessage(self.request.step, "gradient", task.mid, keys, b"", tensors))
        for name, each in parts.items():
            if name in sent and (self.plan.readers[name].source, task.mid) not in self.plan.local:
                continue
            for reader, grad in each:
                if self.plan.readers[name].source is None:
                    self.input_gradients.setdefault((name, reader), {})[task.mid] = grad
                else:
                    self.mailbox.put_gradient(name, task.mid, reader, grad)

    def _weight_gradients(self, task: Task) -> None:
        begin = time.perf_counter()
        self.peers.receive(0)
        run_delayed(self.delayed.pop((task.stage, task.mid)), self.gradients)
        self.trace.append(("W", task.stage, task.mid, begin, time.perf_counter()))

    def _send_bucket(self, parameters: list[torch.Tensor]) -> None:
        """Send gradients that are complete."""
        numbers, latest = self.program.numbers, self.program.latest
        keys = [(numbers[id(one)], latest.get(id(one), 0)) for one in parameters]
        with suppress(ChannelClosed):  # the next receive reports it
            self.control.send(GradientBucket(0, self.request.step, keys, [one.grad for one in parameters]))
