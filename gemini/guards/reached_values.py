"""Reached values: the code of a model is pure, and everything it reads is still what it was when it was sent.

    for step in range(100):
        args.tau = max(0.5, 1.0 - step / 50)    # read in a forward: F.gumbel_softmax(x, args.tau)

A worker has the code of the script as it was when it was sent, with the values that it reads. They are valid until the
script changes one, or replaces a method of a class; from then on the modules whose code reads it run in the controller.
Modules whose code is not proven pure (`gemini.purity`) always do.
"""

from __future__ import annotations

from torch import nn

from gemini.capture.memoized import MEMOIZED, uses_rng
from gemini.guards.base import ChangeGuard
from gemini.purity.proof import find_impure_argument, prove_purity
from gemini.purity.value_watch import MISSING, ValueSnapshot, WatchedValue
from gemini.snapshot.attribute_values import ContentsSnapshot


class ReachedValues(ChangeGuard):
    """The values that the code of a module and its submodules reads. Proven when it is first checked."""

    def __init__(self) -> None:
        self.entries: list[WatchedValue] | None = None  # None: not proven yet
        self._reason = ""
        self._snapshot: ValueSnapshot | None = None
        self._memoized: list[WatchedValue] = []

    def refresh(self) -> None:
        """Prove again at the next check: the script may have added modules, or functions to them."""
        self.entries, self._snapshot = None, None

    def save(self, module: nn.Module) -> ReadsBackup:
        """Save the values, to be restored after trial runs of a module."""
        return ReadsBackup(self.entries or [], module)

    def check(self, module: nn.Module) -> str | None:
        """Return why this code cannot run in a worker, nor in a trial run; None if it can."""
        if self.entries is None:
            proof = prove_purity(module)
            self.entries, self._reason = proof.entries, proof.reason
        if not self._reason and (self._snapshot is None or not self._snapshot.holds()):
            changed = next((entry.name for entry in self.entries if entry.has_changed()), "")
            self._reason = f"its code reads {changed}, which the script changes" if changed else ""
            self._snapshot = None if changed else ValueSnapshot(self.entries)
            self._memoized = [entry for entry in self.entries if isinstance(entry.value, MEMOIZED)]
        if not self._reason and (drawing := next((one.name for one in self._memoized if uses_rng(one.value)), "")):
            self._reason = f"its code calls {drawing}, which caches random numbers"
        return self._reason or None


class ReadsBackup:
    """Values that code reads, as they were: contents of objects and containers, and attributes of classes.

    Attributes that trial runs add to a module remain, unless they hold what cannot be restored: an iterator, a view of
    memory.
    """

    def __init__(self, entries: list[WatchedValue], module: nn.Module) -> None:
        self._module = module
        self._attributes = [(part, set(vars(part))) for part in module.modules()]
        found = [(entry, entry.now()) for entry in entries]
        self._contents = ContentsSnapshot([value for _, value in found])
        self._classes = [(entry, value) for entry, value in found if isinstance(entry.place_owner(), type)]

    def restore(self) -> str:
        """Restore the values; return the types of those that have changed, '' if none has."""
        changed = [(entry, value) for entry, value in self._classes if entry.now() is not value]
        for entry, value in changed:
            if value is MISSING:
                delattr(entry.place_owner(), entry.key)
            else:
                setattr(entry.place_owner(), entry.key, value)
        parts = self._contents.restore(), "class" if changed else "", self._remove_added()
        return ", ".join(filter(None, parts))

    def _remove_added(self) -> str:
        """Remove added attributes that hold what cannot be restored; return their names."""
        found = [(part, key) for part, keys in self._attributes for key in vars(part).keys() - keys]
        impure = [(part, key) for part, key in found if find_impure_argument([vars(part)[key]], self._module)]
        for part, key in impure:
            del vars(part)[key]
        return ", ".join(key for _, key in impure)
