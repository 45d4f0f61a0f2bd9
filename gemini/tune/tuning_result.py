"""Tuning result: ranked configurations with reasons, the frontier of time and memory, and what was rejected and why.

A reason compares a configuration with one that differs in a single degree, both by the same formulas:

    tensor 8 instead of 4: 1.8 GiB less, 6.1 % slower (tensor-parallel exchanges +5.4 %)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gemini.tune.parallel_config import RECOMPUTE, ParallelConfig
from gemini.tune.search_space import Rejections
from gemini.tune.step_report import PART_NAMES, duration, size, step_json
from gemini.tune.step_simulation import StepResult, check_configuration, estimate
from gemini.tune.tuning_request import SEARCHED, TuningRequest

_KEYS = (*SEARCHED, "devices")
_NOTABLE = 0.002
_SEARCHED_RECOMPUTE = ("selective", "full")


@dataclass(frozen=True)
class TuningResult:
    """The outcome of a search. `ranked` are simulated, best first; `found` are all that fit, by closed form."""

    request: TuningRequest
    ranked: tuple[StepResult, ...]
    found: tuple[StepResult, ...]
    rejections: Rejections
    seconds: float
    stopped: bool = False  # by an interrupt: the best so far
    measured: Mapping[str, float] = field(default_factory=dict)  # seconds of a step, by label, of those that ran
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> StepResult:
        """The chosen configuration."""
        return self.ranked[0]

    def frontier(self, axis: str = "memory") -> list[StepResult]:
        """Return the configurations that no other one beats in both time and memory (or money), fastest first."""

        def amount(one: StepResult) -> float:
            return one.money if axis == "money" else one.memory.total

        line: list[StepResult] = []
        for one in sorted(self.found, key=lambda result: (result.seconds, amount(result))):
            if not line or amount(one) < amount(line[-1]) * 0.995:
                line.append(one)
        return line

    def best_by_kind(self) -> dict[str, StepResult]:
        """Return the fastest configuration of every kind, simulated where it was, fastest first."""
        best: dict[str, StepResult] = {}
        for one in (*self.ranked, *sorted(self.found, key=lambda result: result.seconds)):
            best.setdefault(one.config.kind, one)
        return best

    def rank_of(self, config: ParallelConfig) -> float:
        """Return the share of all configurations that fit which are faster than this one, by the same formulas.

        Heavier recomputation of what fits, which the search leaves out, counts as well.
        """
        model, cluster = self.request.model, self.best.cluster
        own = estimate(model, cluster, config).seconds * (1 - 1e-9)
        known = {_key(one.config) for one in self.found}
        times = [one.seconds for one in self.found]
        for one in self.found:
            if "recompute" in self.request.fixed:
                break
            for recompute in self.request.among.get("recompute", _SEARCHED_RECOMPUTE):
                other = replace(one.config, recompute=recompute)
                heavier = RECOMPUTE.index(recompute) > RECOMPUTE.index(one.config.recompute)
                if heavier and _key(other) not in known:
                    known.add(_key(other))
                    times.append(estimate(model, cluster, other).seconds)
        return sum(seconds < own for seconds in times) / max(1, len(times))

    def reasons(self, chosen: StepResult) -> list[str]:
        """Return what each degree of a configuration saves and costs, against its nearest other value."""
        known = {_key(one.config): one for one in self.found}
        own = known.get(_key(chosen.config))
        if own is None:
            own = next((one for one in self.found if _key(one.config) == _key(_closest(chosen.config))), None)
        lines = []
        for name in SEARCHED:
            other = None if own is None else _neighbour(own, name, self.found)
            if own is not None and other is not None:
                lines.append(_compare(name, own, other))
        return lines

    def explain(self, config: ParallelConfig) -> str:
        """Return why a configuration was not chosen."""
        check_configuration(self.request.model, self.best.cluster, config)
        return self.compare(estimate(self.request.model, self.best.cluster, config))

    def compare(self, result: StepResult) -> str:
        """Return why another prediction was not chosen."""
        label = result.config.label()
        if not result.fits:
            need, have = size(result.memory.total), size(result.memory.capacity)
            held = max(result.memory.rows, key=lambda row: row[1])
            return f"{label}: needs {need} per device of {have}, most of it {held[0]} ({size(held[1])})"
        slower = result.seconds / self.best.seconds - 1
        terms = _terms(self.best, result)
        if slower < _NOTABLE:
            return f"{label}: as fast as the chosen one ({slower:+.1%})"
        return f"{label}: fits, {slower:.1%} slower than the chosen one" + (f" ({terms})" if terms else "")

    # ── text and data ────────────────────────────────────────────────────────────────────────────────────────────────
    def table(self, rows: int = 10) -> str:
        """Return the ranked configurations as text."""
        best = self.best
        lines = [
            f"{self.request.model.name} on {best.config.devices} × {best.cluster.device_names}, "
            f"batch {best.config.batch}: "
            f"{len(self.found):,} of {len(self.found) + sum(self.rejections.counts.values()):,} configurations fit, "
            f"{self.seconds:.1f} s" + (" (interrupted: the best so far)" if self.stopped else ""),
            "",
            f"{'':>3}  {'step':>10}  {'slower':>7}  {'MFU':>6}  {'memory':>10}  configuration",
        ]
        for place, one in enumerate(self.ranked[:rows], start=1):
            slower = one.seconds / best.seconds - 1
            devices = f"{one.config.devices} devices, " if self.request.max_devices else ""
            layers = f"; {one.describe_layout()}" if one.layout else ""
            reading = self.measured.get(one.config.label())
            real = f", measured {duration(reading)}" if reading else ""
            lines.append(
                f"{place:>3}  {duration(one.seconds):>10}  {slower:>7.1%}  {one.mfu:>6.1%}  "
                f"{size(one.memory.total):>10}  {devices}{one.config.label()}{layers}{real}"
            )
        lines += ["", "why the first"] + [f"  {line}" for line in self.reasons(best)]
        if self.rejections.counts:
            lines += ["", "rejected"]
            lines += [
                f"  {count:>8,}  {reason}"
                + (f", such as {example}" if (example := self.rejections.examples[reason]) else "")
                for reason, count in self.rejections.counts.most_common(6)
            ]
        if self.notes:
            lines += ["", *self.notes]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return {
            "seconds": self.seconds,
            "interrupted": self.stopped,
            "fitting": len(self.found),
            "rejected": dict(self.rejections.counts),
            "measured": dict(self.measured),
            "ranked": [
                {**step_json(one), "reasons": self.reasons(one) if one is self.best else []} for one in self.ranked
            ],
            "frontier": [
                {"seconds": one.seconds, "bytes": one.memory.total, "parallel": one.config.to_dict()}
                for one in self.frontier()
            ],
        }


def _key(config: ParallelConfig) -> tuple[Any, ...]:
    return tuple(getattr(config, name) for name in _KEYS)


def _closest(config: ParallelConfig) -> ParallelConfig:
    return replace(config, schedule="zb_h1") if config.schedule == "composed" else config


def _neighbour(own: StepResult, name: str, found: tuple[StepResult, ...]) -> StepResult | None:
    """Return the fastest configuration with the nearest other value of one degree, all others equal if possible."""
    value = getattr(own.config, name)
    rest = [key for key in _KEYS if key != name]

    def distance(one: StepResult) -> tuple[float, float, float]:
        changed = sum(getattr(one.config, key) != getattr(own.config, key) for key in rest)
        other = getattr(one.config, name)
        far = abs(other - value) / max(other, value, 1) if isinstance(value, int) else 1.0
        return (changed, far, one.seconds)

    others = [one for one in found if getattr(one.config, name) != value]
    if not others:
        return None
    nearest = min(others, key=distance)
    return nearest if distance(nearest)[0] <= 2 else None


def _compare(name: str, own: StepResult, other: StepResult) -> str:
    value, instead = getattr(own.config, name), getattr(other.config, name)
    shown = ("-".join(value), "-".join(instead)) if isinstance(value, tuple) else (value, instead)
    memory = own.memory.total - other.memory.total
    slower = own.seconds / other.seconds - 1
    amount = f"{size(abs(memory))} {'more' if memory > 0 else 'less'}" if abs(memory) > 2**20 else "the same memory"
    if abs(slower) < _NOTABLE:
        speed = "the same time"
    else:
        speed = f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"
    also = [
        f"{key.replace('_', '-')} {getattr(other.config, key)}"
        for key in _KEYS
        if key not in (name, "order") and getattr(other.config, key) != getattr(own.config, key)
    ]
    terms = _terms(other, own)
    text = f"{name.replace('_', '-')} {shown[0]} instead of {shown[1]}"
    changed = f" (with {', '.join(also)})" if also else ""
    return f"{text}{changed}: {amount}, {speed}{f' ({terms})' if terms else ''}"


def _terms(base: StepResult, other: StepResult) -> str:
    """Return the two parts of the step that differ most, as shares of the base's step."""
    changes = {name: (other.parts[name] - base.parts[name]) / base.seconds for name in base.parts}
    largest = sorted(changes, key=lambda name: -abs(changes[name]))[:2]
    return ", ".join(f"{PART_NAMES[name]} {changes[name]:+.1%}" for name in largest if abs(changes[name]) >= _NOTABLE)
