"""Stage placement: the stage of every forward op, and the devices of every stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StagePlacement:
    """The stage of every forward op by name; `devices` has the first device of every stage, `shards` all of them."""

    stage_of: dict[str, int]
    devices: tuple[str, ...]
    shards: tuple[tuple[str, ...], ...] = ()

    def __call__(self, name: str) -> tuple[int, str]:
        """Return the stage of an op and its device."""
        stage = self.stage_of.get(name, 0)
        return stage, self.devices[stage]

    def shard_devices(self, name: str) -> tuple[str, ...]:
        """Return the devices of the shards of an op."""
        return self.shards[self.stage_of.get(name, 0)]

    @property
    def is_sharded(self) -> bool:
        """Whether stages have several devices."""
        return any(len(devices) > 1 for devices in self.shards)
