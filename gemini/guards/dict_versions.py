"""How often a dictionary was written to, as CPython itself counts.

To look at every name of torch takes a tenth of a millisecond: each of three thousand objects is touched, and after a
step none is in a cache. CPython up to 3.12 gives a dictionary a new number whenever it is written to; while that is the
same, so is everything in it. Where there is no such number, or it is found not to change, nobody is told anything.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

_AT = 3 * ctypes.sizeof(ctypes.c_void_p)  # behind the head of every object and the number of entries


class DictVersion:
    """The number of one dictionary, which is kept: its memory is read."""

    def __init__(self, space: dict[str, Any]) -> None:
        self._space, self._number = space, ctypes.c_uint64.from_address(id(space) + _AT)

    def number(self) -> int:
        """Another one after every write."""
        return self._number.value


def version_of(space: Mapping[str, Any]) -> DictVersion | None:
    """Those of a dictionary, or of that of a class (`vars(cls)`); None where nobody counts."""
    inner = gc.get_referents(space)[:1] if isinstance(space, types.MappingProxyType) else [space]
    return DictVersion(inner[0]) if _ARE_COUNTED and inner and type(inner[0]) is dict else None


def _are_counted() -> bool:
    """Whether numbers are where they are looked for: each kind of write gives another one, and reading does not."""
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 13):
        return False
    probe: dict[str, Any] = {"kept": 0, "changed": 0, "removed": 0}
    number = DictVersion(probe).number
    seen = [number()]
    writes: tuple[Callable[[], Any], ...] = (
        lambda: probe.__setitem__("changed", 1),
        lambda: probe.__setitem__("added", 1),
        lambda: probe.pop("removed"),
        lambda: probe.update(changed=2),
        probe.clear,
    )
    for write in writes:
        if probe.get("kept") or number() != seen[-1]:
            return False
        write()
        seen.append(number())
    return len({*seen}) == len(seen)


_ARE_COUNTED = _are_counted()
