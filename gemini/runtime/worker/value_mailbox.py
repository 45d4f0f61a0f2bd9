"""Value mailbox: values and gradients of a step that wait for their readers in this worker.

A value is dropped when its last local reader has taken it. The gradient of a value has a part from every reader, the
loss included; the parts are summed from the last reader to the first, as on one device.
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
    """Return the number of readers of each value in a worker.

    The loss reads a value of its own stage directly, except a loss that sees all micro-batches at once.
    """
    found: dict[Key, int] = {}
    local = {(task.stage, task.mid) for task in tasks if task.kind == FORWARD}
    mids = {mid for _, mid in local}
    for name, one in readers.items():
        if one.source is None:
            continue
        direct = has_tail or one.source == loss_stage
        stages = [loss_stage if at == LOSS else at for at in one.stages if at != LOSS or not direct]
        ends = LOSS in one.stages and any(task.kind == TAIL for task in tasks)
        for mid in mids:
            count = sum((stage, mid) in local for stage in stages) + ends
            if count:
                found[name, mid] = count
    return found


class ValueMailbox:
    """The values and gradients of one step."""

    def __init__(self, readers: dict[Key, int]) -> None:
        self._readers = readers
        self._left: dict[Key, int] = {}
        self.values: dict[Key, Any] = {}
        self.gradients: dict[Key, dict[int, torch.Tensor | None]] = {}
        self.states: dict[int, bytes] = {}  # of the generator, by the stage that waits for it
        self.group_slab: list[int] | None = None  # where the gradients of the group lie
        self._owned: set[int] = set()  # gradients from peers: their memory has no other user

    def take(self, message: PeerMessage) -> None:
        """Store a message of a peer."""
        if message.kind == "state":
            self.states[message.mid] = message.state
            return
        if message.kind == "buffers":
            self.group_slab = message.names
            return
        for (name, other), tensor in zip(message.names, message.tensors, strict=True):
            if message.kind == "value":
                self.put(name, message.mid, other if tensor is None else tensor)
            else:
                if tensor is not None:
                    self._owned.add(id(tensor))
                self.put_gradient(name, message.mid, other, tensor)

    def put(self, name: str, mid: int, value: Any) -> None:
        """Store a value for local readers, if there are any."""
        count = self._readers.get((name, mid), 0)
        if count:
            self.values[name, mid] = value
            self._left[name, mid] = count

    def pop(self, name: str, mid: int) -> Any:
        """Return a value to one reader."""
        value = self.values[name, mid]
        self._left[name, mid] -= 1
        if not self._left[name, mid]:
            del self.values[name, mid], self._left[name, mid]
        return value

    def put_gradient(self, name: str, mid: int, reader: int, gradient: torch.Tensor | None) -> None:
        """Store the part of one reader."""
        self.gradients.setdefault((name, mid), {})[reader] = gradient

    def has_gradients(self, name: str, mid: int, readers: tuple[int, ...]) -> bool:
        """Return whether all parts have arrived."""
        return not readers or len(self.gradients.get((name, mid), ())) >= len(readers)

    def pop_gradient(self, name: str, mid: int) -> torch.Tensor | None:
        """Return the sum of all parts; None if no reader has one."""
        parts = self.gradients.pop((name, mid), {})
        total: torch.Tensor | None = None
        # The loss comes after all stages.
        for reader in sorted(parts, key=lambda one: (one != LOSS, -one)):
            part = parts[reader]
            if part is None:
                continue
            if total is None:
                total, is_owned = part, id(part) in self._owned
            elif is_owned:
                total.add_(part)
            else:
                total, is_owned = total + part, True
            self._owned.discard(id(part))
        return total
