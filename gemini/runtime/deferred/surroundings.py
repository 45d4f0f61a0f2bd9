"""Surroundings: what a call depends on beside its arguments: modes of modules, buffers, generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch

from gemini.runtime.deferred.work import Work

_TRAINING = attrgetter("training")


class Surroundings:
    """As they were when the call was made."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.modules = work.modules or list(work.model.modules())
        self.modes = [*map(_TRAINING, self.modules)]
        self.buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.generators: list[torch.Tensor] = []
        self._memory: set[int] | None = None

    def begin(self) -> None:
        """The call runs now, after all calls before it."""
        if self.work.draws:
            self.generators = states()
        if self.work.writes:
            self.buffers = [(one, one.detach().clone()) for one in self.work.model.buffers()]

    def undo(self) -> None:
        """A run has failed half way."""
        set_states(self.generators)
        for one, then in self.buffers:
            one.data.copy_(then)

    def memory(self) -> set[int]:
        """Where parameters and buffers are."""
        if self._memory is None:
            model = self.work.model
            self._memory = {memory_of(one) for one in (*model.parameters(), *model.buffers(), *self.work.parameters)}
        return self._memory

    @contextmanager
    def modes_of_then(self) -> Iterator[None]:
        """With the modes that modules had."""
        now = [*map(_TRAINING, self.modules)]
        if now == self.modes:
            yield
            return
        try:
            _set_modes(self, self.modes)
            yield
        finally:
            _set_modes(self, now)

    @contextmanager
    def again(self) -> Iterator[None]:
        """As it was then; afterwards, as it is now."""
        generators = states() if self.work.draws else []
        buffers = [one.detach().clone() for one, _ in self.buffers]
        try:
            self.undo()
            yield
        finally:
            set_states(generators)
            for (one, _), now in zip(self.buffers, buffers, strict=True):
                one.data.copy_(now)


def _set_modes(surroundings: Surroundings, modes: list[bool]) -> None:
    for module, mode in zip(surroundings.modules, modes, strict=True):
        module.training = mode


def states() -> list[torch.Tensor]:
    """The states of the generators that a call may draw from."""
    found = [torch.default_generator.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += [generator.get_state() for generator in torch.cuda.default_generators]
    return found


def set_states(found: list[torch.Tensor]) -> None:
    """Put the generators in these states, if any are given."""
    if found:
        torch.default_generator.set_state(found[0])
        for generator, state in zip(torch.cuda.default_generators, found[1:], strict=False):
            generator.set_state(state)


def memory_of(tensor: torch.Tensor) -> int:
    """What tells the memory of a tensor from that of others."""
    return int(tensor.untyped_storage()._cdata)
