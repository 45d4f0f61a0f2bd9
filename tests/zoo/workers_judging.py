"""Judging one model with workers: the same steps on one device and with units in real processes.

In float64 where a model has kernels for it: losses and gradients of three AdamW steps, weights and buffers after them,
to 1e-9. In float32 otherwise, with SGD, to 1e-4. Both relative to the largest entry of each tensor; what differs is
compared with a second run on one device that begins with weights changed in the last bits: some models amplify that.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch

from gemini.runtime.controller import dispatch
from gemini.runtime.controller.crew import Crew
from gemini.runtime.controller.managed import Managed
from tests.runtime.training import Trained, trained, worst
from tests.zoo import discovery, results
from tests.zoo.judging import Animal, Made, TimeOut, at_most

Fresh = Callable[[], Made]

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}
OPTIMIZERS = {torch.float64: torch.optim.AdamW, torch.float32: torch.optim.SGD}


def judge(animal: Animal, crew: Crew, *, build: int, limit: int, hint: Any = None) -> results.Row:
    """The row of one model."""
    row: results.Row = {
        "cls": animal.cls, "status": "not buildable", "reason": "", "workers": len(crew.workers), **results.versions(),
        "code": results.digest(("capture", "runtime")),
    }  # fmt: skip
    started = time.perf_counter()
    try:
        with at_most(build):
            made, row["hint"] = animal.make(hint)
    except (TimeOut, discovery.NotBuildable) as error:
        row["reason"] = str(error) or f"no recipe worked within {build} s"
        return row
    if not animal.name.startswith("classic/"):
        row["cls"] = type(made[0]).__name__
    row["building"] = round(time.perf_counter() - started, 2)
    try:
        with at_most(limit):
            _compare(row, lambda: _again(animal, made, row["hint"]), crew)
    except TimeOut:
        row.update(status="failed", reason=f"more than {limit} s")
    except Exception as error:
        row.update(status="failed", reason=f"{type(error).__name__}: {error!s:.300}")
    return row


def _compare(row: results.Row, fresh: Fresh, crew: Crew) -> None:
    found = _alone(fresh)
    if found is None:
        row.update(status="not trainable", reason="it does not train on one device either")
        return
    dtype, expected = found
    row["dtype"] = str(dtype).removeprefix("torch.")
    started = time.perf_counter()
    used, given, named = _prepared(fresh, dtype)
    managed = Managed(used, crew, quiet=True)
    dispatch.manage(used, managed)
    got = trained(used, given, named, OPTIMIZERS[dtype])
    row["seconds"] = round(time.perf_counter() - started, 2)
    row["worst"], place = worst(expected, got)
    row["status"] = "equal" if row["worst"] <= LIMITS[dtype] else "different"
    row["reason"] = "; ".join(f"{name}: {why}" for name, why in list(managed.refused.items())[:3])
    _count(row, managed)
    if row["status"] == "different":
        own, _ = worst(expected, _train(fresh, dtype, nudged=True))
        if own >= row["worst"] / 10:
            row["status"] = "noisy"
        row["reason"] = f"{place}, on one device {own:.0e}; {row['reason']}"


def _again(animal: Animal, made: Made, hint: Any) -> Made:
    """The same model and inputs; made anew where they cannot be copied."""
    try:
        return copy.deepcopy(made)
    except Exception:
        return animal.make(hint)[0]


def _count(row: results.Row, managed: Managed) -> None:
    root = managed.observation.root if managed.observation is not None else None
    total = (root.ms or root.inside_ms) if root is not None else 0.0
    row["used"] = len({unit.worker.place for unit in managed.units.values()})
    row["units"] = len(managed.units)
    row["elsewhere"] = round(sum(managed.seen[number].ms for number in managed.units) / max(total, 1e-9), 3)
    row["refused"] = len(managed.refused)
    row["demoted"] = managed.record.demotions


def _alone(fresh: Fresh) -> tuple[torch.dtype, Trained] | None:
    """The steps on one device, in the best precision that the model has kernels for."""
    for dtype in (torch.float64, torch.float32):
        try:
            return dtype, _train(fresh, dtype)
        except Exception:
            continue
    return None


def _train(fresh: Fresh, dtype: torch.dtype, nudged: bool = False) -> Trained:
    used, given, named = _prepared(fresh, dtype)
    if nudged:
        with torch.no_grad():
            for parameter in used.parameters():
                parameter.mul_(1 + 8 * torch.finfo(dtype).eps)
    return trained(used, given, named, OPTIMIZERS[dtype])


def _prepared(fresh: Fresh, dtype: torch.dtype) -> Made:
    """The model and its inputs, in one precision."""
    used, given, named = fresh()
    if dtype is torch.float64:
        used = used.double()
        given, named = _cast((given, named), dtype)
    return used, given, named


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(dtype).requires_grad_(value.requires_grad) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_cast(part, dtype) for part in value)
    if type(value) is dict:
        return {key: _cast(part, dtype) for key, part in value.items()}
    return value
