"""The queue of pending calls: which of them must run before something else happens.

Calls may run in another order than the script made them, as long as that is unobservable. It is observable where both
draw random numbers, or where one writes buffers: then earlier calls run first. A call with effects runs even if the
script has dropped its outputs; any other is discarded with them.
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

from gemini.guards.active_modes import without_saved_tensor_hooks
from gemini.runtime.call_outcome import FallbackReason
from gemini.runtime.deferred.call_context import rng_states, set_rng_states

if TYPE_CHECKING:
    from gemini.runtime.deferred.pending_call import PendingCall

_LEAK = (
    "random numbers were drawn while a call of {} that draws too was deferred, in a way that could not be detected: "
    "they are not those of a run in one process\n    → draw with torch's functions, or before the call"
)


class _QueueState(threading.local):
    def __init__(self) -> None:
        self.busy = 0
        self.entries: list[Callable[[], PendingCall | None]] = []  # in the order of the calls
        self.ran: weakref.WeakSet[PendingCall] = weakref.WeakSet()
        self.generators: list[torch.Tensor] = []  # the state that the next drawing call must find


_state = _QueueState()
listeners: list[Callable[[bool], None]] = []  # called when calls begin to wait, and when none does
os.register_at_fork(after_in_child=_state.__init__)  # type: ignore[misc]


def add(pending: PendingCall) -> None:
    """Add a deferred call."""
    runner = pending.runner
    if runner.draws and not any(one.runner.draws for one in waiting_calls()):
        _state.generators = rng_states()
    has_effects = runner.draws or runner.writes
    _state.entries.append((lambda: pending) if has_effects else weakref.ref(pending, remove_finished))
    _notify(True)


def waiting_calls() -> list[PendingCall]:
    """Return the calls that have not run, in order."""
    found = [one() for one in _state.entries]
    return [one for one in found if one is not None and one.state == "waiting"]


def add_completed(pending: PendingCall) -> None:
    """Add a call that has run and whose values are partly remote."""
    _state.ran.add(pending)


def completed_calls() -> list[PendingCall]:
    """Return the calls that have run and whose values are partly remote."""
    return list(_state.ran)


def is_busy() -> bool:
    """Whether a call is running: ops in this thread belong to it."""
    return _state.busy > 0


def run_earlier_calls(draws: bool, writes: bool, until: PendingCall | None = None) -> None:
    """Run the calls before `until`, or before a call that runs at once, where their order is observable."""
    for other in () if is_busy() else waiting_calls():
        if other is until:
            break
        if (other.runner.draws and draws) or other.runner.writes or writes:
            other.complete(FallbackReason.LATER_CALL)


@contextmanager
def run_exclusively(pending: PendingCall, *, again: bool = False) -> Iterator[None]:
    """Run a call, or run it `again`: before its first run, earlier calls run where the order is observable."""
    is_first = pending.state == "waiting" and not again
    runner = pending.runner
    if is_first:
        run_earlier_calls(runner.draws, runner.writes, pending)
    if is_first and runner.draws:
        _check_generators(pending)
    _state.busy += 1
    _notify(False)
    try:
        with without_saved_tensor_hooks():
            yield
    finally:
        _state.busy -= 1
        if is_first and runner.draws:
            _state.generators = rng_states()
        remove_finished()


def _check_generators(pending: PendingCall) -> None:
    """Check that the generators are as the previous call left them."""
    found = rng_states()
    if not _state.generators:  # the call was deferred in another thread
        return
    if len(found) != len(_state.generators) or not all(map(torch.equal, found, _state.generators)):
        warnings.warn(_LEAK.format(type(pending.runner.model).__name__), stacklevel=2)
        set_rng_states(_state.generators)


def _notify(are_waiting: bool) -> None:
    for listener in listeners:
        listener(are_waiting)


def remove_finished(_: object = None) -> None:
    """Remove calls that have run or were dropped."""
    kept = []
    for entry in _state.entries:
        one = entry()
        if one is not None and one.state == "waiting":
            kept.append(entry)
    _state.entries = kept
    _notify(bool(kept) and not is_busy())
