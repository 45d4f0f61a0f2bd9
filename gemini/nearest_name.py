"""Nearest name: suggestions for misspelled names in error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `word`; None where none is close."""
    names = {name.lower().replace("-", "_"): name for name in known}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), names, n=1, cutoff=0.6)
    return names[close[0]] if close else None


def remedy(word: str, known: Iterable[str]) -> str:
    """Return the remedy of an error: the nearest name, if any, then all names."""
    names = list(known)
    close = nearest(word, names)
    listed = f"choose from {', '.join(names)}"
    return f"did you mean {close!r}? {listed}" if close else listed
