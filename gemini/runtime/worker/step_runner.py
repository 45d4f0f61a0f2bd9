"""Running a step in a worker: one task after the other, each as soon as what it needs is there.

    F   leaves ─► stage ─► outputs, sent at once ─► [loss]
    B   gradients of outputs ─► autograd ─► gradients of inputs, sent at once ─► weight gradients
    I   the same without the weight gradients, which wait for W

A backward action leaves weight gradients in the store and sends what an earlier stage waits for before it computes
them, so a whole backward is I and W in one, too.
"""

from __future__ import annotations

import marshal
import time
from collections import deque
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import torch

from gemini.autograd_engine import accumulate
from gemini.batch_analysis.tape_interpreter import OpRaised, run_ops
from gemini.ir.autograd_modes import Region
from gemini.random_numbers.rng_state import get_state, set_state
from gemini.random_numbers.sliced_rng import RandomOpsDiffer, SlicedRandomOps
from gemini.runtime.step_messages import PeerMessage, Step, Stepped
from gemini.runtime.worker.gradient_buffers import GradientBuffers
from gemini.runtime.worker.microbatch_inputs import MicrobatchInputs
from gemini.runtime.worker.p2p import PeerLinks, StepAborted
from gemini.runtime.worker.program_state import InstalledProgram, WorkerPlan
from gemini.runtime.worker.side_effect_check import Refusal
from gemini.runtime.worker.stage_state import LiveStage, MicrobatchGraph, graph_edge, save_nothing
from gemini.runtime.worker.value_mailbox import ValueMailbox
from gemini.runtime.worker.whole_batch_stage import run_tail
from gemini.schedule.block import FORWARD, LETTERS, WEIGHT_GRADIENT
from gemini.step.delayed_weight_grads import STORE, DelayedGrad, ImmediateQueue, run_delayed
from gemini.step.lower_program import LOSS, TAIL, Task


class StageRaised(Exception):
    """The code of a stage, or of the loss, raised."""

    def __init__(self, error: BaseException, task: Task, stage: LiveStage, what: str = "") -> None:
        super().__init__(error)
        self.error, self.task, self.stage, self.what = error, task, stage, what


class StepBackup(NamedTuple):
    """How things were before a step: buffers, and memory for gradients that was free."""

    buffers: list[tuple[LiveStage, list[tuple[int, torch.Tensor]]]]
    gradients: GradientBuffers

    def restore(self) -> None:
        """Put them back."""
        for stage, saved in self.buffers:
            stage.buffers.restore(saved)
        self.gradients.discard()


class StepRunner:
    """One step in one worker."""

    def __init__(self, plan: WorkerPlan, request: Step, peers: PeerLinks, control: Any) -> None:
        self.plan, self.request, self.peers = plan, request, peers
        self.program: InstalledProgram = plan.program
        self.device = control.transport.device
        self.arrivals = ValueMailbox(plan.local_readers)
        self.inputs = MicrobatchInputs(request.inputs, request.numbers, request.tensors, request.sizes)
        self.operands = MicrobatchInputs(request.operands, [], request.tensors, request.sizes)
        self.gradients = GradientBuffers(control, plan.places)
        self.kept: dict[tuple[int, int], MicrobatchGraph] = {}
        self.left: dict[tuple[int, int], deque[DelayedGrad]] = {}  # weight gradients, by stage and micro-batch
        self.given: dict[tuple[str, int], dict[int, torch.Tensor | None]] = {}  # gradients of inputs, by port and stage
        self.outputs: dict[str, dict[int, Any]] = {name: {} for name in request.keep}
        self.root: torch.Tensor | None = None
        self.saved: dict[int, list[tuple[int, torch.Tensor]]] = {}  # buffers of each stage
        self.trace: list[tuple[str, int, int, float, float]] = []
        self.draws: dict[int, SlicedRandomOps] = {}
        self.drawn: dict[int, bytes] = {}  # states of the generator after a stage has drawn
        *region, self.switches = request.region
        self.region = Region(*region)
        self.records = self.region.grad and plan.is_training

    # ── the step ───────────────────────────────────────────────────────────────────────────────────────────────
    def run(self) -> Stepped:
        """Carry all tasks out; whatever is raised, `undo` puts everything back."""
        if self.request.generator:
            set_state(self.request.generator, self.device)
        self.peers.begin(self.request.step, self.arrivals.take)
        self.saved = {number: stage.buffers.save() for number, stage in self.plan.stages.items()}
        for task in self.plan.tasks:
            if task.kind == FORWARD:
                self._forward(task)
            elif task.kind == WEIGHT_GRADIENT:
                self._weights(task)
            elif task.kind == TAIL:
                run_tail(self, task)
            else:
                self._backward(task)
            self.peers.give_back()
        for number, stage in self.plan.stages.items():
            stage.check(self.saved[number])
        return self._report()

    def before(self) -> StepBackup:
        """What is needed to undo the step; nothing of what was computed in it."""
        return StepBackup([(self.plan.stages[at], saved) for at, saved in self.saved.items()], self.gradients)

    def undo(self) -> None:
        """Everything as it was before the step."""
        self.before().restore()
        for parameter in self.program.parameters:
            parameter.grad = None
        self.kept.clear()
        self.left.clear()

    def _await(self, ready: Any, task: Task) -> float:
        """Wait until something is there; the time when it is."""
        begin = time.perf_counter()
        self.peers.hear(0)
        if ready():
            return begin
        while not ready():
            self.peers.hear()
        end = time.perf_counter()
        self.trace.append(("wait", task.stage, task.mid, begin, end))
        return end

    # ── forward ────────────────────────────────────────────────────────────────────────────────────────────────
    def _forward(self, task: Task) -> None:
        stage, mid = self.plan.stages[task.stage], task.mid
        ports = [port for port in stage.interface.inputs if port.source is not None]
        values = self.arrivals.values
        begin = self._await(
            lambda: all((port.name, mid) in values for port in ports) and self._has_state(task.stage), task
        )
        given = [
            self.inputs.piece(port.name, mid) if port.source is None else self.arrivals.pop(port.name, mid)
            for port in stage.interface.inputs
        ]
        kept = MicrobatchGraph()
        again = self.records and task.stage in self.program.recompute and not task.has_loss
        made = self._run_stage(task, stage, given, kept, saves=not again)
        self._hand_on(task, made)
        if task.has_loss:
            self._loss(task, stage, made, kept)
        if again:
            kept.given, kept.edges, kept.leaves = given, dict.fromkeys(kept.edges), {}
        if task.stage in self.plan.frozen:
            if kept.edges:
                raise Refusal(f"stage {task.stage} has no backward in the plan, and gradients should pass it")
        elif self.records:
            self.kept[task.stage, mid] = kept
        self.trace.append(("F", task.stage, mid, begin, time.perf_counter()))

    def _run_stage(
        self, task: Task, stage: LiveStage, given: list[Any], kept: MicrobatchGraph, saves: bool
    ) -> dict[str, Any]:
        if self.request.shares:
            stage.set_shares(self.request.shares[task.mid])
        if self.program.once and self.program.once[task.stage]:  # written once a step, not once a micro-batch
            once = self.program.once[task.stage]
            stage.buffers.restore([(at, before) for at, before in self.saved[task.stage] if at in once])
        with ExitStack() as stack:
            self.region.enter(stack, Region.current())
            if self.records:
                stack.enter_context(STORE.in_use())
                if not saves:
                    stack.enter_context(save_nothing())
            try:
                if self._draws_of(task.stage):
                    return self._drawing(task, stage, given, kept)
                return stage.forward(given, kept)
            except (Refusal, RandomOpsDiffer, StepAborted):
                raise
            except BaseException as error:
                raise StageRaised(error, task, stage) from error

    def _hand_on(self, task: Task, made: dict[str, Any]) -> None:
        """Send outputs, give them to readers here, and keep those that may be fetched."""
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
            self.arrivals.put(name, task.mid, value)
        for peer in task.state_to:
            self._send_state(peer, task.stage)

    # ── random numbers ─────────────────────────────────────────────────────────────────────────────────────────
    def _draws_of(self, stage: int) -> Any:
        return self.program.draws[stage] if self.program.draws else ()

    def _has_state(self, stage: int) -> bool:
        """Whether the generator's state has come, where a stage must wait for it."""
        drawing = self.program.drawing
        if stage not in drawing or stage == drawing[0] or stage in self.draws:
            return True
        return stage in self.arrivals.states

    def _drawing(self, task: Task, stage: LiveStage, given: list[Any], kept: MicrobatchGraph) -> dict[str, Any]:
        """A forward that draws: for the whole batch the first time, from where the stage before has left off."""
        first = task.stage not in self.draws
        if first:
            state = self.arrivals.states.get(task.stage, self.request.generator)
            if state:
                set_state(state, self.device)
            self.draws[task.stage] = SlicedRandomOps(self._draws_of(task.stage), self.inputs.total)
        where = self.inputs.starts[task.mid], self.inputs.sizes[task.mid]
        with self.draws[task.stage].piece(*((0, self.inputs.total) if task.kind == TAIL else where)):
            made = stage.forward(given, kept)
        if first:
            self.drawn[task.stage] = get_state(self.device)
        return made

    def _send_state(self, peer: int, stage: int) -> None:
        following = self.program.drawing[self.program.drawing.index(stage) + 1]
        if peer == self.plan.place:
            self.arrivals.states[following] = self.drawn[stage]
        else:
            self.peers.send(peer, PeerMessage(self.request.step, "state", following, [], self.drawn[stage], []))

    # ── the loss ───────────────────────────────────────────────────────────────────────────────────────────────
    def _loss(self, task: Task, stage: LiveStage, made: dict[str, Any], kept: MicrobatchGraph) -> None:
        loss = self.plan.loss
        read = loss.reads()
        others = {number: name for number, name in loss.ports.items() if number in read and name not in made}
        self._await(lambda: all((name, task.mid) in self.arrivals.values for name in others.values()), task)
        values = {number: made[name] for number, name in loss.ports.items() if name in made and number in read}
        leaves: dict[str, Any] = {}
        for number, name in others.items():
            if name not in leaves:
                leaves[name] = self._leaf(self.arrivals.pop(name, task.mid), name, kept)
            values[number] = leaves[name]
        self._taped(task, stage, values, kept)

    def _taped(self, task: Task, stage: LiveStage, values: dict[int, Any], kept: MicrobatchGraph) -> None:
        """Run the tape on values of the model's outputs; its root is where the backward begins."""
        loss = self.plan.loss
        for number in {op.writes for op in loss.ops if op.writes in values}:
            values[number] = values[number].clone()  # the model's output stays as it is for others
        with torch.set_grad_enabled(self.records), STORE.in_use():
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
            kept.root, kept.root_like = graph_edge(root), root.detach()
        for number in loss.keep:
            self.outputs.setdefault(f"#{number}", {})[task.mid] = values[number].detach()

    def _leaf(self, value: Any, name: str, kept: MicrobatchGraph) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad and self.records:
            leaf = kept.leaves[name, LOSS] = value.detach().requires_grad_()
            return leaf
        return value

    def _operand(self, number: int, mid: int) -> Any:
        """An operand; one that wants a gradient, a parameter say, gathers it itself over all micro-batches."""
        return self.operands.part(number, mid)

    # ── backward ───────────────────────────────────────────────────────────────────────────────────────────────
    def _expected(self, task: Task, name: str) -> tuple[int, ...]:
        """The readers whose gradients come from afar: the loss of this stage is in its own graph."""
        readers = self.plan.readers[name].stages
        own = task.stage == self.plan.loss_stage and self.plan.tail is None
        here = (*self.plan.frozen, *((LOSS,) if own else ()))
        return tuple(one for one in readers if one not in here)

    def _backward(self, task: Task) -> None:
        stage, mid = self.plan.stages[task.stage], task.mid
        kept = self.kept.pop((task.stage, mid))
        awaited = [(name, self._expected(task, name)) for name in kept.edges]
        arrivals = self.arrivals
        begin = self._await(lambda: all(arrivals.has_gradients(name, mid, who) for name, who in awaited), task)
        if kept.given is not None:
            self._run_again(task, stage, kept)
        roots = [(kept.edges[name], arrivals.pop_gradient(name, mid)) for name, _ in awaited]
        roots = [root for root in roots if root[1] is not None]
        if kept.root is not None:
            roots.insert(0, (kept.root, torch.ones_like(kept.root_like)))
        letter = LETTERS[task.kind]
        queue: deque[DelayedGrad] = ImmediateQueue(self.gradients) if letter == "B" and not task.sends else deque()
        if roots:
            self._run_backward(task, stage, roots, queue)
        self._send_gradients(task, kept)
        if letter == "B":
            run_delayed(queue, self.gradients)
        else:
            self.left[task.stage, mid] = queue
        self.gradients.adopt(stage.parameters)
        self.trace.append((letter, task.stage, mid, begin, time.perf_counter()))

    def _run_backward(self, task: Task, stage: LiveStage, roots: list[Any], queue: deque[DelayedGrad]) -> None:
        drawn = self.draws.get(task.stage) if task.kind != TAIL or self.plan.tail.stage is not None else None
        try:
            with STORE.collecting(queue), drawn.again() if drawn is not None else nullcontext():
                accumulate([edge for edge, _ in roots], [gradient for _, gradient in roots])
        except RandomOpsDiffer:
            raise
        except BaseException as error:
            raise StageRaised(error, task, stage) from error

    def _run_again(self, task: Task, stage: LiveStage, kept: MicrobatchGraph) -> None:
        """The forward once more, this time with its graph; buffers have been written the first time."""
        given, kept.given = kept.given or [], None
        saved = stage.buffers.save()
        kept.edges = {}
        self._run_stage(task, stage, given, kept, saves=True)
        stage.buffers.restore(saved)

    def _send_gradients(self, task: Task, kept: MicrobatchGraph) -> None:
        parts: dict[str, list[tuple[int, torch.Tensor | None]]] = {}
        for (name, reader), leaf in kept.leaves.items():
            parts.setdefault(name, []).append((reader, leaf.grad))
        sent: set[str] = set()
        for peer, names in task.sends:
            found = [(name, reader, grad) for name in names for reader, grad in parts.get(name, ())]
            sent.update(name for name, _, _ in found)
            if found:
                keys, tensors = [(name, reader) for name, reader, _ in found], [grad for _, _, grad in found]
                self.peers.send(peer, PeerMessage(self.request.step, "gradient", task.mid, keys, b"", tensors))
        for name, each in parts.items():
            if name in sent:
                continue
            for reader, grad in each:
                if self.plan.readers[name].source is None:
                    self.given.setdefault((name, reader), {})[task.mid] = grad
                else:
                    self.arrivals.put_gradient(name, task.mid, reader, grad)

    def _weights(self, task: Task) -> None:
        begin = time.perf_counter()
        self.peers.hear(0)
        run_delayed(self.left.pop((task.stage, task.mid)), self.gradients)
        self.trace.append(("W", task.stage, task.mid, begin, time.perf_counter()))

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────────────
    def _report(self) -> Stepped:
        numbers, latest = self.program.numbers, self.program.latest
        leaves = [
            (number, tensor)
            for number, (tensor, _) in self.operands.whole.items()
            if tensor.requires_grad and id(tensor) not in numbers
        ]
        self.gradients.adopt(self.program.parameters)  # also of those that only the loss uses
        loose = [p for p in self.program.parameters if p.grad is not None and p.grad.layout is not torch.strided]
        tensors: list[Any] = [parameter.grad for parameter in loose]
        lent = self.gradients.hand_over()
        for parameter in loose:
            parameter.grad = None
        if self.root is not None:
            tensors.append(self.root)
        given = [key for key, parts in self.given.items() if any(part is not None for part in parts.values())]
        tensors += [self.inputs.gathered(name, self.given[name, stage]) for name, stage in given]
        grown = [(number, leaf.grad) for number, leaf in leaves if leaf.grad is not None]
        tensors += [grad for _, grad in grown]
        drawing = self.program.drawing
        gradients = [
            (numbers[id(one.parameter)], latest.get(id(one.parameter), 0), (one.line, one.header)) for one in lent
        ]
        return Stepped(
            self.request.number, *self.plan.layout(gradients, self.request.layout),
            [numbers[id(parameter)] for parameter in loose], self.root is not None, given,
            [number for number, _ in grown],
            self.drawn.get(drawing[-1], b"") if drawing else b"", marshal.dumps(self.trace), tensors,
        )  # fmt: skip
