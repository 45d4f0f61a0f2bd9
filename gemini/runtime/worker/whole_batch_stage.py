"""Whole-batch stage: the end of the model and the loss, on all samples at once.

    values of all micro-batches ─► whole values ─► [stage] ─► loss ─► backward ─► gradients, cut and sent back

Its weight gradients are computed immediately; gradients of its inputs go to the stages that produced them, one message
per micro-batch, and their backward begins.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from gemini.batch_analysis.batch_kinds import Shard
from gemini.batch_analysis.microbatch_join import join_parts, split_gradient
from gemini.runtime.step_messages import PeerMessage
from gemini.runtime.worker.stage_state import MicrobatchGraph
from gemini.step.delayed_weight_grads import ImmediateQueue
from gemini.step.lower_program import LOSS, Task

if TYPE_CHECKING:
    from gemini.runtime.worker.step_runner import StepRunner

Cut = dict[str, list[torch.Tensor | None]]


def run_tail(run: StepRunner, task: Task) -> None:
    """Run it, forward and backward."""
    names = [name for name, one in run.plan.readers.items() if LOSS in one.stages]
    mids, values = range(len(run.request.sizes)), run.mailbox.values
    stage = None if run.plan.tail.stage is None else run.plan.stages[task.stage]
    begin = run.wait_until(
        lambda: (
            all((name, mid) in values for name in names for mid in mids)
            and (stage is None or run.has_state(task.stage))
        ),
        task,
    )
    whole = {name: _join_value(run, name) for name in names}
    graph = MicrobatchGraph()
    made: dict[str, Any] = {}
    if stage is not None:
        given = [
            _whole_argument(run, port.name) if port.source is None else whole[port.name]
            for port in stage.interface.inputs
        ]
        made = run.run_stage(task, stage, given, graph, saves=True)
        for name, value in made.items():
            if name in run.outputs:
                run.outputs[name][0] = value.detach() if isinstance(value, torch.Tensor) else value
    if run.plan.loss is not None:
        _run_loss(run, task, whole | made, made, graph)
    if run.records:
        _backward_of_tail(run, task, graph, whole)
    run.trace.append(("T", task.stage, 0, begin, time.perf_counter()))


def _join_value(run: StepRunner, name: str) -> Any:
    """Return a value of all micro-batches; it requires a gradient if one of the parts does."""
    parts = [run.mailbox.pop(name, mid) for mid in range(len(run.request.sizes))]
    plain = [part.detach() if isinstance(part, torch.Tensor) else part for part in parts]
    found = join_parts(run.plan.tail.joins[name], plain)
    if isinstance(found, torch.Tensor) and any(part.requires_grad for part in parts):
        found = found.detach().requires_grad_()
    return found


def _whole_argument(run: StepRunner, name: str) -> Any:
    """Return an argument for all samples: plain values of the whole batch follow those of the micro-batches."""
    if name in run.inputs.numbers:
        return run.inputs.numbers[name][len(run.request.sizes)]
    tensor = run.inputs.whole[name][0]
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _run_loss(
    run: StepRunner, task: Task, values: dict[str, Any], made: dict[str, Any], graph: MicrobatchGraph
) -> None:
    loss = run.plan.loss
    read, leaves, found = loss.reads(), dict[str, Any](), dict[int, Any]()
    for number, name in loss.ports.items():
        if number not in read:
            continue
        if name not in made and name not in leaves:
            leaves[name] = run.make_leaf(values[name], name, graph)
        found[number] = made[name] if name in made else leaves[name]
    run.run_loss_tape(task, run.plan.stages[task.stage], found, graph)


def _backward_of_tail(run: StepRunner, task: Task, graph: MicrobatchGraph, whole: dict[str, Any]) -> None:
    """Run the backward of loss and tail; every value that was read gets a gradient, or None."""
    stage = run.plan.stages[task.stage]
    if graph.root is not None:
        run.run_backward(task, stage, [(graph.root, torch.ones_like(graph.root_like))], ImmediateQueue(run.gradients))
    found: dict[str, torch.Tensor | None] = {}
    for (name, reader), leaf in sorted(
        graph.leaves.items(), key=lambda item: item[0][1] != LOSS
    ):  # the last reader first
        if run.plan.readers[name].source is None:
            run.input_gradients[name, reader] = _split_argument_gradient(run, name, leaf.grad)
        elif leaf.grad is not None:
            had = found.get(name)
            found[name] = leaf.grad if had is None else had + leaf.grad
    sizes, joins = run.request.sizes, run.plan.tail.joins
    learning = [name for name, value in whole.items() if isinstance(value, torch.Tensor) and value.requires_grad]
    parts: Cut = {name: split_gradient(joins[name], found.get(name), sizes) for name in learning}
    for mid in range(len(sizes)):
        _send_gradients(run, task, mid, {name: each[mid] for name, each in parts.items()})
    run.gradients.adopt(stage.parameters)


def _split_argument_gradient(
    run: StepRunner, name: str, gradient: torch.Tensor | None
) -> dict[int, torch.Tensor | None]:
    """Return the gradient of an argument by micro-batch, as stages return theirs."""
    kind = run.inputs.whole[name][1]
    if gradient is None or not isinstance(kind, Shard):
        return {0: gradient}
    return dict(enumerate(split_gradient(kind, gradient, run.request.sizes)))


def _send_gradients(run: StepRunner, task: Task, mid: int, gradients: dict[str, torch.Tensor | None]) -> None:
    sent: set[str] = set()
    for peer, names in task.sends:
        mine = [name for name in names if name in gradients]
        sent.update(mine)
        if mine:
            keys, tensors = [(name, LOSS) for name in mine], [gradients[name] for name in mine]
            run.peers.send(peer, PeerMessage(run.request.step, "gradient", mid, keys, b"", tensors))
    for name in gradients.keys() - sent:
        run.mailbox.put_gradient(name, mid, LOSS, gradients[name])
