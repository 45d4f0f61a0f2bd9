"""What a person probably meant: the nearest of the names that exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name closest to `word`, or None where nothing is close."""
    names = {name.lower().replace("-", "_"): name for name in known}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), names, n=1, cutoff=0.6)
    return names[close[0]] if close else None


def remedy(word: str, known: Iterable[str]) -> str:
    """A sentence for an error: the nearest name if there is one, then all of them."""
    names = list(known)
    close = nearest(word, names)
    listed = f"choose from {', '.join(names)}"
    return f"did you mean {close!r}? {listed}" if close else listed
