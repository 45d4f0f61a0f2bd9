"""Program state: the stages of the programs installed in a worker, and its tasks in each kind of step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gemini.runtime.step_messages import Stages, Tasks
from gemini.runtime.worker.gradient_buffers import BufferLayout
from gemini.runtime.worker.group_gradients import GroupGradients, GroupLayout
from gemini.runtime.worker.replica_update import ReplicaGradients
from gemini.runtime.worker.stage_shards import StageShards
from gemini.runtime.worker.stage_state import LiveStage
from gemini.runtime.worker.value_mailbox import count_local_readers
from gemini.schedule.block import FORWARD


class InstalledProgram:
    """The stages of a program in one worker."""

    def __init__(self, message: Stages, tensors: Mapping[int, torch.Tensor]) -> None:
        self.shards: StageShards | None = None
        if message.shards is not None:
            self.shards = StageShards(message.shards, message.place, message.stages, tensors)
        self.stages = {
            number: LiveStage(number, module, message.interfaces[number]) for number, module in message.stages.items()
        }
        self.recompute, self.once = message.recompute, message.once
        self.numbers = {id(tensor): number for number, tensor in tensors.items()}
        # Parameters of the whole model: the loss may use one of another worker's stages.
        self.parameters = [tensor for tensor in tensors.values() if isinstance(tensor, nn.Parameter)]
        if self.shards is not None:
            self.numbers |= self.shards.numbers
            self.parameters += [one.leaf for one in self.shards.slices.values()]
            self.parameters += self.shards.separated
        self.replica_gradients: ReplicaGradients | None = None  # sums of the last step, for the optimizer
        self.latest: dict[int, int] = {}  # the last stage that uses a parameter
        for number, stage in sorted(self.stages.items()):
            self.latest.update({id(parameter): number for parameter in stage.parameters})

    def apply_state(self, state: Any) -> None:
        """Apply training flags and frozen parameters to every stage; None: as in the last step of this program.

        A parameter exists once per process: a module, or a stage of another program, may have changed it since.
        """
        for number, training, trained in state or ():
            self.stages[number].apply_state(training, trained)
        for stage in self.stages.values():
            stage.freeze()


class WorkerPlan:
    """The tasks of a worker in one kind of step."""

    def __init__(self, message: Tasks, program: InstalledProgram) -> None:
        self.program, self.place, self.tasks = program, message.place, message.tasks
        self.readers, self.loss, self.loss_stage = message.readers, message.loss, message.loss_stage
        self.frozen, self.tail, self.draws = message.frozen, message.tail, message.draws
        self.drawing = [stage for stage, patterns in enumerate(message.draws) if patterns]
        self.is_training = self.loss is not None
        self.stages = {number: program.stages[number] for number in sorted({task.stage for task in self.tasks})}
        self.local = {(task.stage, task.mid) for task in self.tasks if task.kind == FORWARD}
        parameters = [p for stage in self.stages.values() for p in stage.parameters]
        slices = program.shards.slices if program.shards is not None else {}
        self.places = BufferLayout.build(p for p in parameters if id(p) not in slices)
        used = {id(p) for p in parameters}
        self.group_places = GroupLayout.build(one for key, one in slices.items() if key in used)
        self.local_readers = count_local_readers(
            self.tasks, self.readers, self.loss_stage, has_tail=self.tail is not None
        )
        self.layouts: dict[int, list[Any]] = {}  # the last layout of gradients that was sent, by its number
        self._numbers = itertools.count(1)
        self.members = message.members
        self.replica_gradients: ReplicaGradients | None = None  # of the last step, to be summed
        self.gradient_parts: dict[int, int] = {}  # of each gradient in the last step, by identity of the parameter

    def reports(self, stage: int) -> bool:
        """Whether this worker reports what all shards of a stage have."""
        return self.program.shards is None or self.program.shards.reports(stage)

    def reports_output(self, name: str) -> bool:
        """Whether this worker keeps an output of its stages, to be fetched."""
        return any(
            self.reports(at) for at, one in self.stages.items() if any(p.name == name for p in one.interface.outputs)
        )

    def group_gradients(self) -> GroupGradients | None:
        """Return the gradients of divided parameters in a new step; None if there are none."""
        shards = self.program.shards
        if shards is None or not self.group_places.parts:
            return None
        members = next(iter({shards.members[stage] for stage in self.stages if stage in shards.members}))
        return GroupGradients(self.group_places, shards.slices, members, members.index(self.place))

    def layout(self, gradients: list[Any], known: int) -> tuple[int, list[Any] | None]:
        """Return the number of a layout of gradients, and the layout itself if the controller does not have it."""
        if known and self.layouts.get(known) == gradients:
            return known, None
        number = next(self._numbers)
        self.layouts = {number: gradients}
        return number, gradients
