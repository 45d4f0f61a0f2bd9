"""Running the tail of a step in a worker: the end of the model and the loss, on all samples at once.

    values of all micro-batches ─► whole values ─► [stage] ─► loss ─► backward ─► gradients, cut and handed back

Its weight gradients are computed at once; gradients of what it has read go to the stages that made it, one message a
micro-batch, and their backward begins.
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
    mids, values = range(len(run.request.sizes)), run.arrivals.values
    stage = None if run.plan.tail.stage is None else run.plan.stages[task.stage]
    begin = run._await(
        lambda: (
            all((name, mid) in values for name in names for mid in mids)
            and (stage is None or run._has_state(task.stage))
        ),
        task,
    )
    whole = {name: _whole(run, name) for name in names}
    kept = MicrobatchGraph()
    made: dict[str, Any] = {}
    if stage is not None:
        given = [_given(run, port.name) if port.source is None else whole[port.name] for port in stage.interface.inputs]
        made = run._run_stage(task, stage, given, kept, saves=True)
        for name, value in made.items():
            if name in run.outputs:
                run.outputs[name][0] = value.detach() if isinstance(value, torch.Tensor) else value
    if run.plan.loss is not None:
        _follow_with_loss(run, task, whole | made, made, kept)
    if run.records:
        _go_back(run, task, kept, whole)
    run.trace.append(("T", task.stage, 0, begin, time.perf_counter()))


def _whole(run: StepRunner, name: str) -> Any:
    """A value of all micro-batches; it has a gradient where one of the parts has."""
    parts = [run.arrivals.pop(name, mid) for mid in range(len(run.request.sizes))]
    plain = [part.detach() if isinstance(part, torch.Tensor) else part for part in parts]
    found = join_parts(run.plan.tail.joins[name], plain)
    if isinstance(found, torch.Tensor) and any(part.requires_grad for part in parts):
        found = found.detach().requires_grad_()
    return found


def _given(run: StepRunner, name: str) -> Any:
    """What came with the call, for all samples: of numbers, that of the whole batch follows those of micro-batches."""
    if name in run.inputs.numbers:
        return run.inputs.numbers[name][len(run.request.sizes)]
    tensor = run.inputs.whole[name][0]
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _follow_with_loss(
    run: StepRunner, task: Task, values: dict[str, Any], made: dict[str, Any], kept: MicrobatchGraph
) -> None:
    loss = run.plan.loss
    read, leaves, found = loss.reads(), dict[str, Any](), dict[int, Any]()
    for number, name in loss.ports.items():
        if number not in read:
            continue
        if name not in made and name not in leaves:
            leaves[name] = run._leaf(values[name], name, kept)
        found[number] = made[name] if name in made else leaves[name]
    run._taped(task, run.plan.stages[task.stage], found, kept)


def _go_back(run: StepRunner, task: Task, kept: MicrobatchGraph, whole: dict[str, Any]) -> None:
    """Backward of loss and tail; every value that was read gets a gradient, or is told that it has none."""
    stage = run.plan.stages[task.stage]
    if kept.root is not None:
        run._run_backward(task, stage, [(kept.root, torch.ones_like(kept.root_like))], ImmediateQueue(run.gradients))
    found: dict[str, torch.Tensor | None] = {}
    for (name, reader), leaf in sorted(kept.leaves.items(), key=lambda item: item[0][1] != LOSS):  # the last one first
        if run.plan.readers[name].source is None:
            run.given[name, reader] = _of_call(run, name, leaf.grad)
        elif leaf.grad is not None:
            had = found.get(name)
            found[name] = leaf.grad if had is None else had + leaf.grad
    sizes, joins = run.request.sizes, run.plan.tail.joins
    learning = [name for name, value in whole.items() if isinstance(value, torch.Tensor) and value.requires_grad]
    parts: Cut = {name: split_gradient(joins[name], found.get(name), sizes) for name in learning}
    for mid in range(len(sizes)):
        _hand_back(run, task, mid, {name: each[mid] for name, each in parts.items()})
    run.gradients.adopt(stage.parameters)


def _of_call(run: StepRunner, name: str, gradient: torch.Tensor | None) -> dict[int, torch.Tensor | None]:
    """The gradient of an argument, by micro-batch, as stages give theirs."""
    kind = run.inputs.whole[name][1]
    if gradient is None or not isinstance(kind, Shard):
        return {0: gradient}
    return dict(enumerate(split_gradient(kind, gradient, run.request.sizes)))


def _hand_back(run: StepRunner, task: Task, mid: int, gradients: dict[str, torch.Tensor | None]) -> None:
    sent: set[str] = set()
    for peer, names in task.sends:
        mine = [name for name in names if name in gradients]
        sent.update(mine)
        if mine:
            keys, tensors = [(name, LOSS) for name in mine], [gradients[name] for name in mine]
            run.peers.send(peer, PeerMessage(run.request.step, "gradient", mid, keys, b"", tensors))
    for name in gradients.keys() - sent:
        run.arrivals.put_gradient(name, mid, LOSS, gradients[name])
