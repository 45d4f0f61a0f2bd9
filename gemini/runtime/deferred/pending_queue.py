"""The queue of pending calls: which of them must be made before something else happens.

Calls may be made in another order than the program made them, as long as nobody can tell. Somebody can where both draw
random numbers, or where one writes to buffers: then those before are made first. A call that has effects is made even
if the program has dropped its outputs; any other is forgotten with them.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from gemini.runtime.deferred.call_context import rng_states, set_rng_states

if TYPE_CHECKING:
    from gemini.runtime.deferred.pending_call import PendingCall

_LEAK = (
    "random numbers were drawn while a call of {} that draws too was put off, in a way that could not be seen: "
    "they are not those of a run in one process\n    → draw with torch's functions, or before the call"
)


class _QueueState(threading.local):
    def __init__(self) -> None:
        self.busy = 0
        self.entries: list[Callable[[], PendingCall | None]] = []  # in the order of the calls
        self.ran: weakref.WeakSet[PendingCall] = weakref.WeakSet()
        self.generators: list[torch.Tensor] = []  # as the next call that draws must find them


_state = _QueueState()
listeners: list[Callable[[bool], None]] = []  # told when calls begin to wait, and when none does any more
os.register_at_fork(after_in_child=_state.__init__)  # type: ignore[misc]


def add(pending: PendingCall) -> None:
    """A call has been put off."""
    runner = pending.runner
    if runner.draws and not any(one.runner.draws for one in waiting_calls()):
        _state.generators = rng_states()
    has_effects = runner.draws or runner.writes
    _state.entries.append((lambda: pending) if has_effects else weakref.ref(pending, remove_finished))
    _notify(True)


def waiting_calls() -> list[PendingCall]:
    """The calls that are still to be made, in order."""
    found = [one() for one in _state.entries]
    return [one for one in found if one is not None and one.state == "waiting"]


def add_completed(pending: PendingCall) -> None:
    """A call has been made whose values are not all here."""
    _state.ran.add(pending)


def completed_calls() -> list[PendingCall]:
    """The calls that have been made and whose values are not all here."""
    return list(_state.ran)


def is_busy() -> bool:
    """Whether a call is being made: what happens now happens in it."""
    return _state.busy > 0


def run_earlier_calls(draws: bool, writes: bool, until: PendingCall | None = None) -> None:
    """Make the calls before this one, or before one that is made at once, if it can be told which came first."""
    for other in () if is_busy() else waiting_calls():
        if other is until:
            break
        if (other.runner.draws and draws) or other.runner.writes or writes:
            other.complete()


@contextmanager
def run_exclusively(pending: PendingCall) -> Iterator[None]:
    """A call is made, or made again: those before it come first, where it matters."""
    is_first = pending.state == "waiting"
    runner = pending.runner
    if is_first:
        run_earlier_calls(runner.draws, runner.writes, pending)
    if is_first and runner.draws:
        _check_generators(pending)
    _state.busy += 1
    _notify(False)
    try:
        yield
    finally:
        _state.busy -= 1
        if is_first and runner.draws:
            _state.generators = rng_states()
        remove_finished()


def _check_generators(pending: PendingCall) -> None:
    """The generators must be as the call before has left them."""
    found = rng_states()
    if not _state.generators:  # the call was put off in another thread
        return
    if len(found) != len(_state.generators) or not all(map(torch.equal, found, _state.generators)):
        warnings.warn(_LEAK.format(type(pending.runner.model).__name__), stacklevel=2)
        set_rng_states(_state.generators)


def _notify(are_waiting: bool) -> None:
    for listener in listeners:
        listener(are_waiting)


def remove_finished(_: object = None) -> None:
    """Forget calls that have been made or dropped."""
    kept = []
    for entry in _state.entries:
        one = entry()
        if one is not None and one.state == "waiting":
            kept.append(entry)
    _state.entries = kept
    _notify(bool(kept) and not is_busy())
