"""Step history: path, duration and loss of every call of a run, in bounded memory.

Calls are counted in buckets of equal size. When there are too many buckets, neighbours are merged and the size doubles:
the history of ten calls has one per bucket, that of a million calls a few thousand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_BUCKETS = 512


@dataclass
class StepBucket:
    """Consecutive calls: how many of each kind, the sum of their durations, the last loss."""

    counts: dict[int, int] = field(default_factory=dict)  # by index of `StepHistory.kinds`
    timed: int = 0
    total_ms: float = 0.0
    loss: float | None = None

    def merge(self, other: StepBucket) -> None:
        """Add the calls after these."""
        for kind, count in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
        self.timed, self.total_ms = self.timed + other.timed, self.total_ms + other.total_ms
        self.loss = self.loss if other.loss is None else other.loss


@dataclass
class StepHistory:
    """The calls of one model, in order. `kinds` are pairs of path and reason."""

    size: int = 1  # calls per bucket
    kinds: list[tuple[str, str]] = field(default_factory=list)
    buckets: list[StepBucket] = field(default_factory=list)
    calls: int = 0
    _places: dict[tuple[str, str], int] = field(default_factory=dict, repr=False, compare=False)
    _unread: Any = field(default=None, repr=False, compare=False)  # a loss on another device

    def record(self, path: str, reason: str) -> None:
        """Count a call."""
        if self.calls % self.size == 0:
            if len(self.buckets) == _BUCKETS:
                self._halve()
            if self.calls % self.size == 0:
                self.buckets.append(StepBucket())
        self.calls += 1
        kind = self._places.setdefault((path, reason), len(self.kinds))
        if kind == len(self.kinds):
            self.kinds.append((path, reason))
        counts = self.buckets[-1].counts
        counts[kind] = counts.get(kind, 0) + 1

    def record_time(self, step_ms: float) -> None:
        """Record the duration of the last call."""
        if self.buckets:
            self.buckets[-1].timed += 1
            self.buckets[-1].total_ms += step_ms

    def record_loss(self, loss: Any) -> None:
        """Record the loss of the last call, a tensor of one element; on another device it is read at the next call."""
        self.read_loss()
        if loss.numel() == 1 and self.buckets and not loss.is_complex():
            loss = loss.detach()
            self._unread = self.buckets[-1], loss if loss.device.type == "cpu" else loss.clone()
            if loss.device.type == "cpu":
                self.read_loss()

    def read_loss(self) -> None:
        """Read a loss that is on another device."""
        if self._unread is not None:
            (bucket, loss), self._unread = self._unread, None
            bucket.loss = float(loss)

    def _halve(self) -> None:
        for first, second in zip(self.buckets[::2], self.buckets[1::2], strict=True):
            first.merge(second)
        del self.buckets[1::2]
        self.size *= 2

    # ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        self.read_loss()
        rows = [[sorted(one.counts.items()), one.timed, round(one.total_ms, 4), one.loss] for one in self.buckets]
        return {"size": self.size, "calls": self.calls, "kinds": self.kinds, "buckets": rows}

    @staticmethod
    def from_json(data: dict[str, Any]) -> StepHistory:
        """Build a history from plain data."""
        buckets = [StepBucket(dict(counts), timed, ms, loss) for counts, timed, ms, loss in data["buckets"]]
        return StepHistory(data["size"], [(path, reason) for path, reason in data["kinds"]], buckets, data["calls"])
