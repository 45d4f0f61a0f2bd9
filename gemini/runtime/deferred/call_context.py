"""Surroundings: what a call depends on beside its arguments: modes of modules, buffers, generators, switches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from gemini.capture import torch_flags
from gemini.guards.model_version import MISSING
from gemini.runtime.deferred.contract import StepRunner
from gemini.runtime.deferred.deferred_tensor import deferred_in, real_of, replaced

_TRAINING = attrgetter("training")


class Surroundings:
    """As they were when the call was made."""

    def __init__(self, runner: StepRunner, standing: Any = None) -> None:
        """`standing` is the state that the model is in, if it has one: it knows the modes of modules."""
        self.runner, self._standing = runner, standing
        self.modules = runner.modules or list(runner.model.modules()) if standing is None else []
        self.modes = [*map(_TRAINING, self.modules)]
        self.switches = torch_flags.current_flags()
        self.buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.generators: list[torch.Tensor] = []
        self._memory: set[int] | None = None

    def begin(self) -> None:
        """The call runs now, after all calls before it."""
        if self.runner.draws:
            self.generators = states()
        if self.runner.writes:
            self.buffers = [(one, one.detach().clone()) for one in self.runner.model.buffers()]

    def undo(self) -> None:
        """A run has failed half way."""
        set_states(self.generators)
        for one, then in self.buffers:
            one.data.copy_(then)

    def memory(self) -> set[int]:
        """Where parameters and buffers are."""
        if self._memory is None:
            model = self.runner.model
            self._memory = {memory_of(one) for one in (*model.parameters(), *model.buffers(), *self.runner.parameters)}
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
    def of_then(self, number: int) -> Iterator[None]:
        """With those modes and switches of torch, and the attributes that the call saw: without what the program has
        put there since, and what is still to be computed: a metric's sums, a list of losses. Whoever looks at the model
        would ask for it, in the midst of computing it. `number` is that of the call, in the order in which calls were
        made.
        """
        with torch_flags.use_flags(self.switches), self._attributes_of_then(number):
            yield

    @contextmanager
    def _attributes_of_then(self, number: int) -> Iterator[None]:
        later = [] if self._standing is None else self._standing.then(self._is_put_off, self.runner.is_call_output)
        if later is None:
            yield
            return
        now = [space.get(name, MISSING) for space, name, _ in later]
        then = [_settled(before, number) for _, _, before in later]
        with self.modes_of_then():
            try:
                for (space, name, _), before in zip(later, then, strict=True):
                    _set(space, name, before)
                yield
            finally:
                for (space, name, _), value in zip(later, now, strict=True):
                    _set(space, name, value)

    def _is_put_off(self, value: Any) -> bool:
        return any(True for _ in deferred_in(value)) and not self.runner.is_call_output(value)

    @contextmanager
    def again(self) -> Iterator[None]:
        """As it was then; afterwards, as it is now."""
        generators = states() if self.runner.draws else []
        buffers = [one.detach().clone() for one, _ in self.buffers]
        try:
            self.undo()
            yield
        finally:
            set_states(generators)
            for (one, _), now in zip(self.buffers, buffers, strict=True):
                one.data.copy_(now)


def _settled(value: Any, number: int) -> Any:
    """With ordinary tensors: those of calls before, the others were not there yet."""
    if isinstance(value, list):
        return [_settled(one, number) for one in value if not _is_later(one, number)]
    if isinstance(value, dict):
        return {key: _settled(one, number) for key, one in value.items() if not _is_later(one, number)}
    return MISSING if value is MISSING or _is_later(value, number) else replaced(value, real_of)


def _is_later(value: Any, number: int) -> bool:
    return any(
        one._real is None and one._pending is not None and one._pending.number >= number for one in deferred_in(value)
    )


def _set(space: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        space.pop(name, None)
    else:
        space[name] = value


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
