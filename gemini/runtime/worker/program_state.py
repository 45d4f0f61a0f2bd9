"""What a worker has been given: the stages of programs, and what to do in steps of each kind."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gemini.runtime.step_messages import Stages, Tasks
from gemini.runtime.worker.gradient_buffers import BufferLayout
from gemini.runtime.worker.stage_state import LiveStage
from gemini.runtime.worker.value_mailbox import count_local_readers


class InstalledProgram:
    """The stages of a program in one worker."""

    def __init__(self, message: Stages, homes: Mapping[int, torch.Tensor]) -> None:
        self.stages = {
            number: LiveStage(number, module, message.interfaces[number]) for number, module in message.stages.items()
        }
        self.recompute, self.draws, self.once = message.recompute, message.draws, message.once
        self.drawing = [stage for stage, patterns in enumerate(message.draws) if patterns]
        self.numbers = {id(tensor): number for number, tensor in homes.items()}
        # Parameters of the whole model: the loss may use one that no stage here has.
        self.parameters = [tensor for tensor in homes.values() if isinstance(tensor, nn.Parameter)]
        self.latest: dict[int, int] = {}  # the last stage that uses a parameter
        for number, stage in sorted(self.stages.items()):
            self.latest.update({id(parameter): number for parameter in stage.parameters})

    def follow(self, state: Any) -> None:
        """Training flags and frozen parameters of every stage; None: as in the last step of this program.

        A parameter is one for the whole process: a unit, or a stage of another program, may have followed since.
        """
        for number, training, trained in state or ():
            self.stages[number].follow(training, trained)
        for stage in self.stages.values():
            stage.freeze()


class WorkerPlan:
    """What a worker does in a step of one kind."""

    def __init__(self, message: Tasks, program: InstalledProgram) -> None:
        self.program, self.place, self.tasks = program, message.place, message.tasks
        self.readers, self.loss, self.loss_stage = message.readers, message.loss, message.loss_stage
        self.frozen, self.tail = message.frozen, message.tail
        self.is_training = self.loss is not None
        self.stages = {number: program.stages[number] for number in sorted({task.stage for task in self.tasks})}
        self.places = BufferLayout.made(p for stage in self.stages.values() for p in stage.parameters)
        self.local_readers = count_local_readers(
            self.tasks, self.readers, self.loss_stage, has_tail=self.tail is not None
        )
        self.layouts: dict[int, list[Any]] = {}  # the one of gradients that was told last, by its number
        self._numbers = itertools.count(1)

    def layout(self, gradients: list[Any], known: int) -> tuple[int, list[Any] | None]:
        """The number of a layout of gradients, and the layout itself if the controller does not know it."""
        if known and self.layouts.get(known) == gradients:
            return known, None
        number = next(self._numbers)
        self.layouts = {number: gradients}
        return number, gradients
