"""Link costs: the time to move a tensor from one device to another.

A link is a latency and a bandwidth, one for all pairs or a matrix `[from][to]`. Times are in the unit of the
spans, bandwidth in bytes per unit of time. Work that stays on its devices moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gemini.errors import PlacementError
from gemini.schedule.block import Number

Table = Number | tuple[tuple[Number, ...], ...]


@dataclass(frozen=True)
class Links:
    """Latency and bandwidth between devices; a bandwidth of 0 ignores the size."""

    latency: Table = 0
    bandwidth: Table = 0

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth"):
            table = getattr(self, name)
            if not isinstance(table, (int, float)):
                table = tuple(tuple(row) for row in table)
                object.__setattr__(self, name, table)
            values = [value for row in table for value in row] if isinstance(table, tuple) else [table]
            wrong = [value for value in values if not math.isfinite(value) or value < 0]
            if wrong:
                raise PlacementError(f"{name} {wrong[0]} between devices\n    → give a finite number, 0 or more")
            if isinstance(table, tuple) and any(len(row) != len(table) for row in table):
                raise PlacementError(
                    f"{name} has rows of {sorted({len(row) for row in table})} entries for {len(table)} devices\n"
                    "    → give one row per device and one entry per device in each row"
                )

    def check(self, ndevs: int) -> Links:
        """These links, if they are made for `ndevs` devices; an error otherwise."""
        for name, table in (("latency", self.latency), ("bandwidth", self.bandwidth)):
            if isinstance(table, tuple) and len(table) != ndevs:
                raise PlacementError(
                    f"{name} between {len(table)} devices for a plan on {ndevs}\n"
                    "    → give one number, or one row per device and one entry per device in each row"
                )
        return self

    def between(self, devices: Sequence[int]) -> Links:
        """These links between some of the devices; plain numbers where all pairs are alike."""
        return Links(_select(self.latency, devices), _select(self.bandwidth, devices))

    @property
    def free(self) -> bool:
        """Whether moving tensors costs nothing."""
        return self.latency == 0 and self.bandwidth == 0

    def cost(self, source: int, target: int, nbytes: Number = 0) -> Number:
        """Time for `nbytes` from one device to another."""
        if source == target:
            return 0
        bandwidth = _entry(self.bandwidth, source, target)
        return _entry(self.latency, source, target) + (nbytes / bandwidth if bandwidth else 0)

    def delay(self, sources: Sequence[int], targets: Sequence[int], nbytes: Number = 0) -> Number:
        """Time until `nbytes` that all of `sources` hold have reached every one of `targets`."""
        if self.free:
            return 0
        waits = [
            min(self.cost(source, target, nbytes) for source in sources) for target in targets if target not in sources
        ]
        return max(waits, default=0)


FREE = Links()


def _entry(table: Table, source: int, target: int) -> Number:
    return table[source][target] if isinstance(table, tuple) else table


def _select(table: Table, devices: Sequence[int]) -> Table:
    if not isinstance(table, tuple):
        return table
    found = {table[source][target] for source in devices for target in devices if source != target}
    if len(found) <= 1:
        return found.pop() if found else 0
    return tuple(tuple(table[source][target] for target in devices) for source in devices)
