"""Lost workers: the end of a program whose model does not fit into the memory of this host alone.

The weights and the state of optimizers are in this process, as the last complete step has left them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.atomic_files import unused_path
from gemini.errors import WorkerError
from gemini.runtime.devices.host_memory import MB, available_memory, format_bytes

if TYPE_CHECKING:
    from gemini.planner.step_plan import StepPlan


def check_fits(model: nn.Module, optimizers: Sequence[Any], plan: StepPlan | None, folder: Path, reason: str) -> None:
    """Save the last complete step and raise WorkerError where a step by this plan would not fit into this process."""
    left = available_memory()
    if plan is None or left is None or any(parameter.is_cuda for parameter in model.parameters()):
        return
    needed = estimate_bytes(plan)
    if needed <= left[0]:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = unused_path(folder, "last_step-").with_suffix(".pt")
    torch.save({"model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers]}, path)
    raise WorkerError(
        f"{reason.partition(chr(10))[0]}; {type(model).__name__} needs {format_bytes(needed)} more in this process, "
        f"{format_bytes(left[0])} {left[1]} is available\n"
        f"    → the last complete step is in {path}: load it and go on, also on fewer hosts"
    ) from None


def estimate_bytes(plan: StepPlan) -> float:
    """Return the memory that a step takes in one process beside the weights, which it has."""
    parts = [worker.memory for worker in plan.analysis.workers]
    return MB * sum(one.gradients_mb + one.activations_mb + one.working_mb for one in parts)
