"""Whether a file can be affected by a pass at all, by looking for substrings."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def triggered(triggers: Sequence[str], text: str) -> bool:
    """Whether `text` holds one of `triggers`, or there are none."""
    if not triggers or any(trigger in text for trigger in triggers):
        return True
    if text.isascii():
        return False
    # Python reads identifiers in NFKC: ``𝐭orch`` is ``torch``.
    normal = unicodedata.normalize("NFKC", text)
    return any(trigger in normal for trigger in triggers)
