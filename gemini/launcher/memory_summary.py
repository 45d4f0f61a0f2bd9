"""Memory summary: the predicted memory per worker, and what stays in the process of the script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemini.planner.shard_memory import estimate_workers

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan

_LISTED = 8  # workers
_MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Adagrad": 1, "RMSprop": 1}
_LARGE = 0.25  # of the memory of the largest worker: optimizer state above it is a warning


def memory_rows(plan: StepPlan, trained_by: str, state_mb: float) -> list[tuple[str, str]]:
    """Return the rows of the summary about memory; `state_mb`: the present optimizer state."""
    found = estimate_workers(plan)
    totals = [one.total_mb for one in found]
    largest = max(found, key=lambda one: one.total_mb)
    each = " / ".join(_mb(one) for one in totals[:_LISTED]) + (" / …" if len(totals) > _LISTED else "")
    other = largest.total_mb - largest.weights_mb - largest.gradients_mb - largest.activations_mb
    parts = (
        f"weights {_mb(largest.weights_mb)}, gradients {_mb(largest.gradients_mb)}, "
        f"activations {_mb(largest.activations_mb)}, other {_mb(other)}"
    )
    rows = [("memory", f"{each} MB per worker; the largest: {parts}")]
    if not state_mb:  # before the first step of the optimizer
        weights = sum(
            one.numel() * one.element_size() for one in plan.graph.bound_model().parameters() if one.requires_grad
        )
        state_mb = _MOMENTS.get(trained_by, 0) * weights / 1e6
    if state_mb:
        is_large = state_mb > _LARGE * largest.total_mb
        text = f"{_mb(state_mb)} MB of optimizer state ({trained_by}) stay in this process"
        rows.append(("[yellow]warning[/yellow]" if is_large else "", text))
    return rows


def _mb(size: float) -> str:
    return f"{size:.0f}" if size >= 10 else f"{size:.1f}"
