"""Call context: what a call depends on beside its arguments: training modes, buffers, generators, torch flags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from gemini.capture import torch_flags
from gemini.guards.model_version import MISSING
from gemini.runtime.deferred.contract import CallRunner
from gemini.runtime.deferred.deferred_tensor import find_deferred, materialize, replace_deferred

_TRAINING = attrgetter("training")


class CallContext:
    """The context at the time of the call."""

    def __init__(self, runner: CallRunner, model_state: Any = None) -> None:
        """`model_state`: the state that the model is in, if known; it records the training modes."""
        self.runner, self._model_state = runner, model_state
        self.modules = runner.modules or list(runner.model.modules()) if model_state is None else []
        self.modes = [*map(_TRAINING, self.modules)]
        self.switches = torch_flags.current_flags()
        self.buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.generators: list[torch.Tensor] = []
        self._storages: set[int] | None = None

    def begin(self) -> None:
        """Save generators and buffers; the call runs next, after all earlier calls."""
        if self.runner.draws:
            self.generators = rng_states()
        if self.runner.writes:
            self.buffers = [(one, one.detach().clone()) for one in self.runner.model.buffers()]

    def roll_back(self) -> None:
        """Restore generators and buffers after a run that failed half way."""
        set_rng_states(self.generators)
        for one, then in self.buffers:
            one.data.copy_(then)

    def storages(self) -> set[int]:
        """Return the storages of parameters and buffers."""
        if self._storages is None:
            model = self.runner.model
            self._storages = {
                storage_id(one) for one in (*model.parameters(), *model.buffers(), *self.runner.parameters)
            }
        return self._storages

    @contextmanager
    def restore_modes(self) -> Iterator[None]:
        """Inside, modules have the training modes of the call."""
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
    def restore(self, number: int) -> Iterator[None]:
        """Inside, training modes, torch flags and attributes are those that the call saw.

        Attributes that the script has assigned since, and values that are still to be computed (a metric's sums, a list
        of losses), are hidden: an analysis of the model would otherwise request them while they are being computed.
        `number` is that of the call, in the order of calls.
        """
        with torch_flags.use_flags(self.switches), self._restore_attributes(number):
            yield

    @contextmanager
    def _restore_attributes(self, number: int) -> Iterator[None]:
        later = (
            [] if self._model_state is None else self._model_state.then(self._is_deferred, self.runner.is_call_output)
        )
        if later is None:
            yield
            return
        now = [space.get(name, MISSING) for space, name, _ in later]
        then = [_materialize_earlier(before, number) for _, _, before in later]
        with self.restore_modes():
            try:
                for (space, name, _), before in zip(later, then, strict=True):
                    _set_attribute(space, name, before)
                yield
            finally:
                for (space, name, _), value in zip(later, now, strict=True):
                    _set_attribute(space, name, value)

    def _is_deferred(self, value: Any) -> bool:
        return any(True for _ in find_deferred(value)) and not self.runner.is_call_output(value)

    @contextmanager
    def rewind(self) -> Iterator[None]:
        """Inside, generators and buffers are as before the call; afterwards, as they are now."""
        generators = rng_states() if self.runner.draws else []
        buffers = [one.detach().clone() for one, _ in self.buffers]
        try:
            self.roll_back()
            yield
        finally:
            set_rng_states(generators)
            for (one, _), now in zip(self.buffers, buffers, strict=True):
                one.data.copy_(now)


def _materialize_earlier(value: Any, number: int) -> Any:
    """Replace deferred tensors of earlier calls by real ones, and drop those of later calls."""
    if isinstance(value, list):
        return [_materialize_earlier(one, number) for one in value if not _is_later(one, number)]
    if isinstance(value, dict):
        return {key: _materialize_earlier(one, number) for key, one in value.items() if not _is_later(one, number)}
    return MISSING if value is MISSING or _is_later(value, number) else replace_deferred(value, materialize)


def _is_later(value: Any, number: int) -> bool:
    return any(
        one._real is None and one._pending is not None and one._pending.number >= number for one in find_deferred(value)
    )


def _set_attribute(space: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        space.pop(name, None)
    else:
        space[name] = value


def _set_modes(context: CallContext, modes: list[bool]) -> None:
    for module, mode in zip(context.modules, modes, strict=True):
        module.training = mode


def rng_states() -> list[torch.Tensor]:
    """Return the states of the generators that a call may use."""
    found = [torch.default_generator.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += [generator.get_state() for generator in torch.cuda.default_generators]
    return found


def set_rng_states(found: list[torch.Tensor]) -> None:
    """Restore the states of the generators, if any are passed."""
    if found:
        torch.default_generator.set_state(found[0])
        for generator, state in zip(torch.cuda.default_generators, found[1:], strict=False):
            generator.set_state(state)


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that identifies the memory of a tensor."""
    return int(tensor.untyped_storage()._cdata)
