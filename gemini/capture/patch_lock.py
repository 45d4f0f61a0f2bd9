"""Turns: one thread at a time changes how modules are called, or traces a call.

Both replace `nn.Module.__call__` and put back what they found: two threads of a program that train at the same time
would put back each other's.
"""

from __future__ import annotations

import os
import threading

TURN = threading.RLock()


def _renew() -> None:
    """A forked process has one thread, which does not hold what another held."""
    reset = getattr(TURN, "_at_fork_reinit", None)
    if reset is not None:
        reset()


os.register_at_fork(after_in_child=_renew)
