"""Which values of a tape share memory: what is written to one of them shows in the others."""

from __future__ import annotations

from collections.abc import Iterable


class AliasGroups:
    """Values by the memory they are in."""

    def __init__(self, shared: Iterable[frozenset[int]]) -> None:
        self._members: dict[int, set[int]] = {}
        for group in shared:
            members = set(group)
            self._members.update(dict.fromkeys(group, members))

    def add(self, value: int, shares: Iterable[int]) -> None:
        """A value that shares memory with others; a negative number stands for memory that no value is."""
        members = {value}
        for other in shares:
            members |= self._members.get(other, {other})
        for one in members:
            self._members[one] = members

    def is_unaliased(self, value: int) -> bool:
        """Whether no other value shares its memory."""
        return len(self._members.get(value, ())) <= 1

    def sources(self, value: int) -> set[int]:
        """The values in its memory that are not made of it: those before it, and other parts of something unnamed."""
        members = self._members.get(value, {value})
        is_part = any(one < 0 for one in members)
        return {one for one in members if 0 <= one != value and (one < value or is_part)}
