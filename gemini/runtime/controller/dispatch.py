"""Dispatch: calls of units go to their workers; everything else runs as the program wrote it.

`nn.Module.__call__` is replaced once, and weak tables say which modules are managed and which are units. So the
program's forward runs here, in Python, with all its branches; only the units in it are elsewhere.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gemini.capture.hooks import with_hooks
from gemini.capture.interception import ORIGINAL_CALL
from gemini.runtime.controller.managed import Managed
from gemini.runtime.controller.microbatches import SplitCall
from gemini.runtime.controller.observing import Observation
from gemini.runtime.controller.remote import Call, RefusedError
from gemini.runtime.controller.unit import Unit
from gemini.runtime.memory.heap import give_back
from gemini.runtime.transport.tensors import Unsendable

_managed: weakref.WeakKeyDictionary[nn.Module, Managed] = weakref.WeakKeyDictionary()
_units: weakref.WeakKeyDictionary[nn.Module, tuple[Managed, Unit]] = weakref.WeakKeyDictionary()


class _State(threading.local):
    here: bool = False  # everything runs in this process
    observation: Observation | None = None


_state = _State()


def manage(model: nn.Module, managed: Managed) -> None:
    """Dispatch the calls of a model from now on."""
    _managed[model] = managed
    if nn.Module.__call__ is ORIGINAL_CALL:
        nn.Module.__call__ = _call


def find(model: nn.Module) -> Managed | None:
    """What is known of a managed model."""
    return _managed.get(model)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if _state.here:
        return ORIGINAL_CALL(module, *args, **kwargs)
    if _state.observation is not None:
        return _state.observation.call(module, lambda: ORIGINAL_CALL(module, *args, **kwargs))
    found = _units.get(module)
    if found is not None:
        managed, unit = found
        return with_hooks(module, args, kwargs, lambda forward, a, k: _dispatch(managed, unit, forward, a, k))
    known = _managed.get(module)
    if known is not None and not known.planned and known.crew.is_ours:
        if known.observation is None:
            return _first_call(module, known, args, kwargs)
        _add(known, known.plan(module, known.observation))
    if known is not None and known.units:
        give_back()
    if known is not None and known.micro_batches > 1 and known.units and known.crew.is_ours:
        return with_hooks(module, args, kwargs, lambda forward, a, k: _split(module, known, forward, a, k))
    return ORIGINAL_CALL(module, *args, **kwargs)


def _split(model: nn.Module, managed: Managed, forward: Any, args: Any, kwargs: Any) -> Any:
    with here():
        proof = managed.proof(model, args, kwargs)
    if not proof.reason:
        return SplitCall(model, args, kwargs, proof, managed.micro_batches).run()
    return ORIGINAL_CALL(model, *args, **kwargs) if forward is model else forward(*args, **kwargs)


def _first_call(model: nn.Module, managed: Managed, args: Any, kwargs: Any) -> Any:
    """Watch a call. Units begin with the next one, so that whatever backward runs again of this one runs here too."""
    observation = _state.observation = Observation(model)
    try:
        result = ORIGINAL_CALL(model, *args, **kwargs)
    finally:
        _state.observation = None
    managed.observation = observation
    return result


def _add(managed: Managed, units: dict[nn.Module, Unit]) -> None:
    for module, unit in units.items():
        _units[module] = (managed, unit)


def _dispatch(managed: Managed, unit: Unit, forward: Any, args: Any, kwargs: Any) -> Any:
    if not managed.crew.is_ours:
        return _here(forward, args, kwargs)
    if unit.worker.link.channel.torn:
        managed.give_up("an interrupt has cut the connection to a worker")
        return _here(forward, args, kwargs)
    reason = unit.obstacle()
    if not reason:
        try:
            managed.calls += 1
            return Call(unit, args, kwargs).run()
        except (RefusedError, Unsendable) as refusal:
            reason = str(refusal)
    _units.pop(unit.module, None)
    _add(managed, managed.split(unit, reason))
    # What the unit did has been undone: run it again, with the modules inside it as units where they can be.
    return forward(*args, **kwargs) if not isinstance(forward, nn.Module) else ORIGINAL_CALL(forward, *args, **kwargs)


@contextmanager
def here() -> Iterator[None]:
    """Run everything in this process for a while."""
    before, _state.here = _state.here, True
    try:
        yield
    finally:
        _state.here = before


def _here(forward: Any, args: Any, kwargs: Any) -> Any:
    """Run a unit in this process, with everything inside it."""
    with here():
        return forward(*args, **kwargs)
