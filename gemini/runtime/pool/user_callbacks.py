"""Asides: code of the program that runs while a step is on its way: handlers of signals, what prints and warnings of
workers come to. Whoever has looked at the program before must look again then."""

from __future__ import annotations

_count = [0]


def note() -> None:
    """Code of the program has run, or is about to."""
    _count[0] += 1


def counted() -> int:
    """How often that has been; another number than before: it has been since."""
    return _count[0]
