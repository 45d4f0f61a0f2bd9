"""The reply of a worker to a step: what is left to do after the last task, and what the controller gets."""

from __future__ import annotations

import marshal
from typing import TYPE_CHECKING, Any

import torch

from gemini.runtime.step_messages import Stepped
from gemini.runtime.worker.gradient_buffers import GradientBuffers
from gemini.runtime.worker.gradient_stream import StreamedGradients
from gemini.runtime.worker.group_gradients import gather_slices
from gemini.runtime.worker.replica_update import ReplicaGradients

if TYPE_CHECKING:
    from gemini.runtime.worker.step_runner import StepRunner


def build_reply(runner: StepRunner) -> Stepped:
    """Collect what a worker has to tell after the last task of a step: gradients, the loss, random state, times."""
    numbers, latest = runner.program.numbers, runner.program.latest
    leaves = [
        (number, tensor)
        for number, (tensor, _) in runner.operands.whole.items()
        if tensor.requires_grad and id(tensor) not in numbers and runner.plan.reports(runner.plan.loss_stage)
    ]
    if isinstance(runner.gradients, StreamedGradients):
        runner.gradients.end()
        runner.plan.gradient_parts = runner.gradients.parts
    runner.gradients.adopt(runner.program.parameters)  # including those that only the loss uses
    if runner.plan.members:
        _retain_for_sum(runner)
    _sum_partial_gradients(runner)
    gathered = _gather_slices(runner)
    if not any(runner.plan.reports(stage) for stage in runner.plan.stages):
        return _build_empty_reply(runner)
    if runner.program.shards is not None:
        _withhold(runner)
    loose = [p for p in runner.program.parameters if p.grad is not None and runner.gradients.is_loose(p.grad)]
    tensors: list[Any] = [parameter.grad for parameter in loose] + [whole for _, whole in gathered]
    shared = runner.gradients.hand_over()
    if runner.gradients.group is not None and not runner.gradients.group.is_handed_over(shared):
        runner.control.transport.buffers[0].pool.release(runner.gradients.group.release())
    for parameter in loose:
        parameter.grad = None
    loose += [leaf for leaf, _ in gathered]
    if runner.root is not None:
        tensors.append(runner.root)
    given = [key for key, parts in runner.input_gradients.items() if any(part is not None for part in parts.values())]
    tensors += [runner.inputs.join_gradients(name, runner.input_gradients[name, stage]) for name, stage in given]
    operand_gradients = [(number, leaf.grad) for number, leaf in leaves if leaf.grad is not None]
    tensors += [grad for _, grad in operand_gradients]
    drawing = runner.plan.drawing
    gradients = [
        (numbers[id(one.parameter)], latest.get(id(one.parameter), 0), (one.device, one.header)) for one in shared
    ]
    return Stepped(
        runner.request.number, *runner.plan.layout(gradients, runner.request.layout),
        [(numbers[id(one)], latest.get(id(one), 0)) for one in loose], runner.root is not None, given,
        [number for number, _ in operand_gradients],
        runner.rng_states.get(drawing[-1], b"") if drawing else b"", marshal.dumps(runner.trace), tensors,
    )  # fmt: skip


def _sum_partial_gradients(runner: StepRunner) -> None:
    """Sum the gradients of which every shard has a part, after the last backward."""
    shards = runner.program.shards
    for parameter in shards.partial if shards is not None else ():
        stage = runner.program.latest.get(id(parameter), -1)
        group = runner.group_of(stage)
        if group is not None and stage in runner.plan.stages and parameter.grad is not None:
            parameter.grad.copy_(group.all_reduce(parameter.grad))


def _gather_slices(runner: StepRunner) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the divided parameters of shards that share no memory, with their whole gradients, in shard 0."""
    shards, leaves = runner.program.shards, runner.plan.group_places.parts
    if shards is None or not runner.shards_gather or not leaves:
        return []
    found = []
    for members in sorted({shards.members[stage] for stage in runner.plan.stages if stage in shards.members}):
        found += gather_slices([shards.slices[key] for key in leaves], runner.groups[members])
    return found


def _retain_for_sum(runner: StepRunner) -> None:
    """Retain the gradients of the stages, which the first of the replicas reports."""
    is_first = runner.plan.place == runner.plan.members[0]
    stages = [parameter for _, stage in sorted(runner.plan.stages.items()) for parameter in stage.parameters]
    copies = not is_first and isinstance(runner.gradients, GradientBuffers)
    runner.plan.replica_gradients = found = ReplicaGradients(stages, copies=copies)
    if not is_first:
        runner.gradients.withhold(found.parameters)


def _withhold(runner: StepRunner) -> None:
    """Drop what the first shard of a group reports, where this worker has other stages alone."""
    shards = runner.program.shards
    runner.gradients.withhold([] if shards is None else shards.unreported)
    if not runner.plan.reports(runner.plan.loss_stage):
        runner.root = None
    runner.input_gradients = {
        (name, stage): parts for (name, stage), parts in runner.input_gradients.items() if runner.plan.reports(stage)
    }


def _build_empty_reply(runner: StepRunner) -> Stepped:
    """Return the reply of a shard whose results the first shard of its group reports."""
    drawing = runner.plan.drawing
    for parameter in runner.program.parameters:
        parameter.grad = None
    runner.gradients.discard()
    state = runner.rng_states.get(drawing[-1], b"") if drawing else b""
    return Stepped(
        runner.request.number, *runner.plan.layout([], runner.request.layout), [], False, [], [], state,
        marshal.dumps(runner.trace), [],
    )  # fmt: skip
