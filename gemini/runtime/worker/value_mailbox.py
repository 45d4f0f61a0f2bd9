"""Arrivals: values and gradients of a step that a worker has and that wait for their readers.

A value is dropped when its last reader in this worker has taken it. The gradient of a value has a part from every
reader, the loss included; the parts are added up from the last reader to the first, as on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemini.runtime.step_messages import PeerMessage
from gemini.schedule.block import FORWARD
from gemini.step.lower_program import LOSS, TAIL, Readers, Task

Key = tuple[str, int]


def count_local_readers(
    tasks: Sequence[Task], readers: dict[str, Readers], loss_stage: int, *, has_tail: bool
) -> dict[Key, int]:
    """How many readers each value has in a worker; the loss of the stage that makes a value reads it directly, but for
    one that sees all micro-batches at once."""
    found: dict[Key, int] = {}
    here = {(task.stage, task.mid) for task in tasks if task.kind == FORWARD}
    mids = {mid for _, mid in here}
    for name, one in readers.items():
        if one.source is None:
            continue
        direct = has_tail or one.source == loss_stage
        stages = [loss_stage if at == LOSS else at for at in one.stages if at != LOSS or not direct]
        ends = LOSS in one.stages and any(task.kind == TAIL for task in tasks)
        for mid in mids:
            count = sum((stage, mid) in here for stage in stages) + ends
            if count:
                found[name, mid] = count
    return found


class ValueMailbox:
    """Of one step."""

    def __init__(self, readers: dict[Key, int]) -> None:
        self._readers = readers
        self._left: dict[Key, int] = {}
        self.values: dict[Key, Any] = {}
        self.gradients: dict[Key, dict[int, torch.Tensor | None]] = {}
        self.states: dict[int, bytes] = {}  # of the generator, by the stage that waits for it
        self._ours: set[int] = set()  # gradients that arrived: nobody else sees their memory

    def take(self, parcel: PeerMessage) -> None:
        """What a peer has sent."""
        if parcel.kind == "state":
            self.states[parcel.mid] = parcel.state
            return
        for (name, other), tensor in zip(parcel.names, parcel.tensors, strict=True):
            if parcel.kind == "value":
                self.put(name, parcel.mid, other if tensor is None else tensor)
            else:
                if tensor is not None:
                    self._ours.add(id(tensor))
                self.put_gradient(name, parcel.mid, other, tensor)

    def put(self, name: str, mid: int, value: Any) -> None:
        """A value for readers in this worker, if there are any."""
        count = self._readers.get((name, mid), 0)
        if count:
            self.values[name, mid] = value
            self._left[name, mid] = count

    def pop(self, name: str, mid: int) -> Any:
        """A value for one reader."""
        value = self.values[name, mid]
        self._left[name, mid] -= 1
        if not self._left[name, mid]:
            del self.values[name, mid], self._left[name, mid]
        return value

    def put_gradient(self, name: str, mid: int, reader: int, gradient: torch.Tensor | None) -> None:
        """The part of one reader."""
        self.gradients.setdefault((name, mid), {})[reader] = gradient

    def has_gradients(self, name: str, mid: int, readers: tuple[int, ...]) -> bool:
        """Whether all parts are there."""
        return not readers or len(self.gradients.get((name, mid), ())) >= len(readers)

    def pop_gradient(self, name: str, mid: int) -> torch.Tensor | None:
        """The sum of all parts; None where no reader has one."""
        parts = self.gradients.pop((name, mid), {})
        total: torch.Tensor | None = None
        # The loss comes after all stages.
        for reader in sorted(parts, key=lambda one: (one != LOSS, -one)):
            part = parts[reader]
            if part is None:
                continue
            if total is None:
                total, is_ours = part, id(part) in self._ours
            elif is_ours:
                total.add_(part)
            else:
                total, is_ours = total + part, True
            self._ours.discard(id(part))
        return total
