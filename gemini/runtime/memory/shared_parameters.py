"""Shared parameters: the tensors of a model in memory that its workers map.

A tensor lives on the device of the workers that use it. One that the script has replaced (`p.data = other`,
`model.half()`) is in memory of the script: before workers use it, its storage gets shared memory, with all tensors on
it. That is the tensor's former shared memory if nothing else uses that any more, else a new segment. A tensor that
returns to shared memory (`p.data = backup`) is known there. What shares memory in the script shares it always.

Memory whose address something holds cannot move (`gemini.runtime.memory.alias_holders`), and a tensor with aliases
outside the model cannot move to another device: such tensors stay, and their modules run in the controller. So does a
tensor that the script has moved to another device.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from gemini.runtime.devices.base import Device, Segment
from gemini.runtime.memory.alias_holders import find_holders, has_other_tensors
from gemini.runtime.memory.optimizer_state import move_optimizer_state
from gemini.runtime.memory.shared_layout import (
    MemoryPosition,
    MisplacedTensor,
    can_share,
    exchange_memory,
    memory_positions,
    move_to_segment,
    storage_bytes,
)
from gemini.runtime.memory.shared_tensor import SharedTensor, TensorMapper

_AT_ONCE = 256 << 20  # bytes that are moved at once, and exist twice meanwhile
_SPARE = 1  # unused former positions of a tensor that are retained: it may get other memory repeatedly
_count: Any = getattr(torch._C, "_storage_Use_Count", None)  # the number of tensors on a storage


class PlacedModule(Protocol):
    """A module of the model with the worker that runs it."""

    number: int
    name: str
    module: nn.Module
    shared_parameters: SharedParameters
    tensors: list[torch.Tensor]  # its parameters and buffers


class SharedParameters:
    """The shared memory of each tensor of a model, under the same numbers in all processes."""

    def __init__(self, pool: TensorMapper, model_device: torch.device) -> None:
        self.pool = pool
        self.lock = threading.RLock()  # held while tensors are moved
        self.model_device = model_device  # where the script has put the model
        self.names: dict[int, str] = {}  # of tensors, in messages
        self.positions: dict[int, MemoryPosition] = {}  # at which the workers use each tensor
        self.devices: dict[int, str] = {}  # the device of each
        self.relocations = 0  # times that tensors got other memory; workers installed before use the former
        self.module_numbers: list[int] = []  # of the modules that workers run
        self._shared: dict[int, list[SharedTensor]] = {}  # present and former ones, by identity of the tensor
        self._staying: dict[int, tuple[torch.Tensor, MemoryPosition, str]] = {}  # that cannot move, with the reason
        pool.shared.users.add(self)
        weakref.finalize(self, pool.forget_model, self.module_numbers, [], []).atexit = False

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move what can move into shared memory, if all workers compute on the device that the tensors are on."""
        devices = {worker.device.name: worker.device for worker in self.pool.workers}
        if len(devices) == 1 and not self.pool.workers[0].is_remote:
            (device,) = devices.values()
            moving = [one for one in tensors if id(one) not in self.devices and device.owns(one) and can_share(one)]
            moving = [one for one in moving if not self._use_known(one, device)]
            self._note_staying(moving, device)
            self._share([one for one in moving if not self.find_staying([one])], device)

    def find_staying(self, tensors: Iterable[torch.Tensor]) -> str:
        """Return why one of these tensors cannot be in shared memory, with its present memory; '' where all can."""
        if not self._staying:
            return ""
        for tensor in tensors:
            known = self._staying.get(id(tensor))
            if known is not None and memory_positions([tensor]) == [known[1]]:
                return known[2]
        return ""

    # ── before workers use tensors ─────────────────────────────────────────────────────────────────────────────
    def ensure_shared(self, tensors: Sequence[torch.Tensor], device: Device) -> bool:
        """Move all tensors to shared memory of a device; return whether workers must be sent one of them again.

        Raise MisplacedTensor if a tensor cannot move.
        """
        if self._are_shared(tensors, device):
            return False  # the usual case
        with self.lock:  # each micro-batch has a thread, and all of them call this
            return not self._are_shared(tensors, device) and self._move_to_shared(tensors, device)

    def _are_shared(self, tensors: Sequence[torch.Tensor], device: Device) -> bool:
        identities = [*map(id, tensors)]
        if memory_positions(tensors) != [*map(self.positions.get, identities)]:
            return False
        return {*map(self.devices.get, identities)} <= {device.name}

    def _move_to_shared(self, tensors: Sequence[torch.Tensor], device: Device) -> bool:
        before, unplaced = self.relocations, list[torch.Tensor]()
        for tensor, position in zip(tensors, memory_positions(tensors), strict=True):
            if self.positions.get(id(tensor)) == position and self.devices[id(tensor)] == device.name:
                continue
            self._check(tensor, device)
            if not self._use_known(tensor, device):
                unplaced.append(tensor)
        unplaced = [tensor for tensor in {id(tensor): tensor for tensor in unplaced}.values() if can_share(tensor)]
        if not self.find_staying(unplaced):
            self._note_staying(unplaced, device)
        if reason := self.find_staying(unplaced):
            raise MisplacedTensor(reason)
        self._share(self._move_to_former(unplaced, device), device)
        return self.relocations != before

    def _check(self, tensor: torch.Tensor, device: Device) -> None:
        owner = self.devices.get(id(tensor), device.name)
        if owner != device.name:
            raise MisplacedTensor(f"it shares a tensor with a module on {owner}")
        if tensor.device not in (device.where, self.model_device) or (
            id(tensor) in self.devices and not device.owns(tensor)
        ):
            raise MisplacedTensor(f"the script has moved it to {tensor.device}")

    def _note_staying(self, tensors: list[torch.Tensor], device: Device) -> None:
        """Note which tensors cannot move to a device, and why."""
        holders = find_holders(tensors)
        groups: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        elsewhere = {one.storage: one.device for one in self.pool.shared.on_storages(groups) if one.is_there}
        for key, group in groups.items():
            reason, other = "", elsewhere.get(key, device.name)
            if holder := holders.get(key):
                reason = f"its memory cannot be shared with workers: {holder} may hold its address"
            elif other != device.name:
                reason = f"it shares memory with a module on {other}"
            elif group[0].device != device.where and has_other_tensors(group):
                reason = f"other tensors share its memory, which would not be the same on {device.where}"
            for tensor in group:
                if reason:
                    (position,) = memory_positions([tensor])
                    name = self.names.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")
                    self._staying[id(tensor)] = (tensor, position, f"{name}: {reason}")
                else:
                    self._staying.pop(id(tensor), None)

    # ── moving ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _use_known(self, tensor: torch.Tensor, device: Device) -> bool:
        """Use a tensor where it is, if workers know it there; return whether they do."""
        (position,) = memory_positions([tensor])
        found = self.pool.shared.find(device.name, tensor, position)
        if found is not None:
            self.relocations += id(tensor) in self.positions
            self._use(found)
        return found is not None

    def _move_to_former(self, tensors: list[torch.Tensor], device: Device) -> list[torch.Tensor]:
        """Give storages the former shared memory of their tensors where that is unused; return the other tensors."""
        if not any(id(tensor) in self._shared for tensor in tensors):
            return tensors
        views = Counter(shared.storage for held in self._shared.values() for shared in held)
        sharing = Counter(tensor.untyped_storage()._cdata for tensor in tensors)
        left = []
        for tensor in tensors:
            former = next(
                (
                    shared
                    for shared in self._shared.get(id(tensor), ())
                    if shared.device == device.name and _can_take_place(tensor, shared, views[shared.storage])
                ),
                None,
            )
            if former is None or sharing[tensor.untyped_storage()._cdata] > 1:
                left.append(tensor)
                continue
            with torch.inference_mode(False):
                storage_bytes(former.view).copy_(storage_bytes(tensor))
                exchange_memory([tensor.untyped_storage()], [former.view.untyped_storage()])
                former.view = tensor.detach()
            self.relocations += self.positions.get(id(tensor)) != former.position
            self._use(former)
        return left

    def _share(self, tensors: list[torch.Tensor], device: Device) -> None:
        """Move tensors into new segments, with all tensors of models on their storages."""
        moving = {id(tensor): tensor for tensor in tensors}
        if not moving:
            return
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        moving |= {id(shared.tensor): shared.tensor for shared in self.pool.shared.on_storages(storages)}
        self.relocations += any(key in self._shared for key in moving)
        for group in _groups([*moving.values()]):
            segment, layouts = move_to_segment(group, device)
            first = self._map(segment, [layouts[id(tensor)] for tensor in group], device)
            for number, tensor in enumerate(group, first):
                shared = SharedTensor(self.pool, tensor, number, device.name, segment)
                self.pool.shared.add(shared)
                self._use(shared)
            device.trim()
        if device.where != self.model_device:
            move_optimizer_state(tensors)

    def _map(self, segment: Segment, layouts: Any, device: Device) -> int:
        try:
            return self.pool.map_tensors(segment, layouts, device.name)
        except BaseException:
            self.relocations += 1  # workers installed before use other memory
            raise

    def _use(self, shared: SharedTensor) -> None:
        """Use a shared tensor from now on. Models that use another position of the tensor look for it again."""
        key = id(shared.tensor)
        self.positions[key], self.devices[key] = shared.position, shared.device
        for worker in self.pool.workers:
            if worker.device.name == shared.device and worker.link.shared_numbers.get(key) != shared.number:
                worker.link.shared_numbers[key] = shared.number
                for other in self.pool.shared.users:
                    if other is not self and other.positions.pop(key, None) is not None:
                        other.relocations += 1
        former = [one for one in self._shared.get(key, ()) if one is not shared and one.is_there]
        spare = [one for one in former if _is_unused(one)][_SPARE:]
        self._shared[key] = [shared, *(one for one in former if one not in spare)]

    def release(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Move tensors that no worker uses, or all, back to the device on which the script had them."""
        known = [held[0].tensor for held in self._shared.values()]
        for tensor in known if tensors is None else tensors:
            if id(tensor) in self.devices and tensor.device != self.model_device:
                for table in (self.devices, self.positions, self._shared):
                    table.pop(id(tensor), None)
                for worker in self.pool.workers:
                    worker.link.shared_numbers.pop(id(tensor), None)
                tensor.data = tensor.data.to(self.model_device)
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.to(self.model_device)


def _is_unused(shared: SharedTensor) -> bool:
    """Return whether nothing but a shared tensor refers to its storage."""
    return _count is not None and _count(shared.view.untyped_storage()._cdata) <= 2


def _can_take_place(tensor: torch.Tensor, shared: SharedTensor, views: int) -> bool:
    """Return whether a tensor fits into shared memory that nothing else uses any more."""
    view = shared.view
    handle = view.untyped_storage()  # counts as one reference
    if _count is None or _count(handle._cdata) > 1 + views or not shared.is_there:
        return False
    storage = tensor.untyped_storage()
    return (view.dtype, view.shape, view.stride(), view.storage_offset(), handle.nbytes(), handle.device) == (
        tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), storage.nbytes(), storage.device
    )  # fmt: skip


def _groups(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors in groups of bounded size; those that share a storage are in one group."""
    storages: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    group: list[torch.Tensor] = []
    size = 0
    for sharing in storages.values():
        more = sharing[0].untyped_storage().nbytes()
        if group and size + more > _AT_ONCE:
            yield group
            group, size = [], 0
        group += sharing
        size += more
    if group:
        yield group
