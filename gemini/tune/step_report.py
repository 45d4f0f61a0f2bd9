"""Step report: a predicted step as text and as plain data."""

from __future__ import annotations

from typing import Any

from gemini.tune.step_simulation import PARTS, StepResult

PART_NAMES = {
    "compute": "computation",
    "recompute": "recomputation",
    "tensor": "tensor-parallel exchanges",
    "context": "context-parallel exchanges",
    "expert": "expert-parallel exchanges",
    "data": "ZeRO gathers and reductions per micro-batch",
    "pipeline": "pipeline transfers",
    "bubble": "bubble",
    "gradients": "gradient reduction after the backward",
    "optimizer": "optimizer",
    "controller": "controller: optimizer, calls and replies",
}
_JOULES_PER_KWH = 3.6e6


def step_text(result: StepResult) -> str:
    """Return the prediction as a page of text."""
    config, memory = result.config, result.memory
    rate = result.tokens_per_second
    unit = "samples" if result.tokens == config.batch else "tokens"
    lines = [
        f"{result.model} on {config.devices} × {result.cluster.device_names} ({result.cluster.name})",
        f"  {config.label()}, {config.precision}",
        "",
        f"step          {duration(result.seconds)}",
        f"throughput    {number(rate)} {unit}/s, {number(rate / config.devices)} per device",
        f"utilization   MFU {result.mfu:.1%}, HFU {result.hfu:.1%}",
        "",
        "time of the busiest device",
    ]
    lines += [
        f"  {PART_NAMES[name]:<44}{duration(seconds):>10}{seconds / result.seconds:>8.1%}"
        for name, seconds in result.parts.items()
        if seconds / result.seconds >= 5e-4
    ]
    where = f", stage {memory.device}" if config.pipeline > 1 else ""
    if result.layout:
        lines.insert(2, f"  {result.describe_layout()}")
    lines += ["", f"memory of a device{where}"]
    lines += [f"  {name:<44}{size(nbytes):>10}{nbytes / memory.capacity:>8.1%}" for name, nbytes in memory.rows]
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    lines.append(f"  {'total':<44}{size(memory.total):>10}{memory.total / memory.capacity:>8.1%}  {verdict}")
    lines += _cost_lines(result)
    return "\n".join(lines)


def _cost_lines(result: StepResult) -> list[str]:
    lines = []
    many, what = (1e9, "10⁹ tokens") if result.tokens != result.config.batch else (1e6, "10⁶ samples")
    amount = result.tokens / many
    if result.money:
        lines.append(f"price         {result.money:.4g} per step, {result.money / amount:,.2f} per {what}")
    if result.joules:
        energy = result.joules / _JOULES_PER_KWH
        lines.append(f"energy        {energy:.4g} kWh per step, {energy / amount:,.1f} kWh per {what}, at full power")
    return ["", *lines] if lines else []


def step_json(result: StepResult) -> dict[str, Any]:
    """Return the prediction as plain values."""
    return {
        "model": result.model,
        "cluster": result.cluster.name,
        "device": result.cluster.device.name,
        "parallel": result.config.to_dict(),
        "seconds": result.seconds,
        "parts": {name: result.parts[name] for name in PARTS},
        "tokens_per_second": result.tokens_per_second,
        "tokens_per_second_per_device": result.tokens_per_second / result.config.devices,
        "mfu": result.mfu,
        "hfu": result.hfu,
        "bubble": result.bubble,
        "memory": result.memory.to_dict(),
        "fits": result.fits,
        "layout": list(result.layout) or None,
        "places": list(result.places) or None,
        "money_per_step": result.money or None,
        "joules_per_step": result.joules or None,
    }


def number(value: float) -> str:
    """Return a rate with at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a time with a unit that suits it."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def size(nbytes: float) -> str:
    """Return an amount of memory."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.1f} MiB"
