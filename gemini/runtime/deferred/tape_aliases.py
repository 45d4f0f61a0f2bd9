"""Tape aliases: which values of a tape share memory, so that a write to one shows in the others."""

from __future__ import annotations

from collections.abc import Iterable


class AliasGroups:
    """Values grouped by the memory they are in."""

    def __init__(self, shared: Iterable[frozenset[int]]) -> None:
        self._members: dict[int, set[int]] = {}
        for group in shared:
            members = set(group)
            self._members.update(dict.fromkeys(group, members))

    def add(self, value: int, shares: Iterable[int]) -> None:
        """Add a value that shares memory with others; a negative number stands for memory without a value."""
        members = {value}
        for other in shares:
            members |= self._members.get(other, {other})
        for one in members:
            self._members[one] = members

    def is_unaliased(self, value: int) -> bool:
        """Whether no other value shares its memory."""
        return len(self._members.get(value, ())) <= 1

    def sources(self, value: int) -> set[int]:
        """Return the values in its memory that do not derive from it: earlier ones, other parts of unnamed memory."""
        members = self._members.get(value, {value})
        is_part = any(one < 0 for one in members)
        return {one for one in members if 0 <= one != value and (one < value or is_part)}
