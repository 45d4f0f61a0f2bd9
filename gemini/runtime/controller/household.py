"""The household: the tensors of a model that have a home in shared memory, and who knows of them.

A tensor that the program has moved (`p.data = other`, `model.half()`) is brought home again before it is used from
afar: its contents are copied into its home if they fit there, else it gets another home.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from gemini.runtime.controller.crew import Crew
from gemini.runtime.controller.faults import Record
from gemini.runtime.memory.homes import Home, can_move, move_in
from gemini.runtime.transport.link import Link


class Household:
    """Homes of tensors, the same numbers in all processes."""

    def __init__(self, crew: Crew, record: Record) -> None:
        self.crew, self.record = crew, record
        self.tensors: list[torch.Tensor] = []  # held, so that no identity is reused
        self.homes: dict[int, Home] = {}
        self.views: dict[int, torch.Tensor] = {}  # the memory of each home
        self.addresses: dict[int, int] = {}
        self.units: list[int] = []  # numbers of units that workers have
        self._numbers: list[int] = []
        links = [worker.link for worker in crew.workers]
        weakref.finalize(self, _leave, crew, links, self.units, self._numbers).atexit = False

    def take_in(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give a home to those that have none."""
        new = {id(tensor): tensor for tensor in tensors if id(tensor) not in self.homes and can_move(tensor)}
        if not new:
            return
        segment, homes = move_in(new.values())
        arrived = [tensor for tensor in new.values() if id(tensor) in homes]
        first = self.crew.placed
        self.crew.place(segment, [homes[id(tensor)] for tensor in arrived])
        segment.forget_descriptor()
        self.tensors += arrived
        for number, tensor in enumerate(arrived, first):
            for worker in self.crew.workers:
                worker.link.held[id(tensor)] = number
            self._numbers.append(number)
        self.homes.update(homes)
        self.views.update({id(tensor): tensor.detach() for tensor in arrived})
        self.addresses.update({id(tensor): tensor.data_ptr() for tensor in arrived})

    def bring_home(self, tensors: Iterable[torch.Tensor]) -> bool:
        """See to it that all are at home; whether one has another home now, so that workers must be told."""
        moved = False
        for tensor in tensors:
            if self.addresses.get(id(tensor)) == tensor.data_ptr():
                continue
            view = self.views.get(id(tensor))
            if view is not None and (view.dtype, view.shape, view.stride()) == (
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
            ):
                view.copy_(tensor.detach())
                tensor.data = view
            else:
                self.homes.pop(id(tensor), None)
                self.addresses.pop(id(tensor), None)
                self.take_in([tensor])
                moved = True
        return moved


def _leave(crew: Crew, links: list[Link], units: list[int], numbers: list[int]) -> None:
    """The model is gone: its tensors' identities may soon be those of others."""
    gone = set(numbers)
    for link in links:
        link.held = {key: number for key, number in link.held.items() if number not in gone}
    crew.forget(units, numbers)
