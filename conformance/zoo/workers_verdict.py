"""Judging one model with workers: the same steps on one device and with units in real processes.

    float64, three AdamW steps   all losses, all gradients, all weights and buffers at the end: to 1e-9
    float32, three SGD steps     losses to 1e-5; gradients of the first step, weights and buffers at the end to 1e-4; a
                                 model without float64 kernels takes its AdamW steps so as well

Everything is relative to the largest entry of its own tensor. Where a tensor differs more, the result is *noise* if
workers equal, in every bit, one process that sums gradients in their order (`workers_order.py`): then all that differs
is rounding, and AdamW divides gradients that are 0 but for rounding by their own size. Where even that run differs,
each tensor is compared with what last bits of the weights change on one device.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from conformance.zoo import discovery, results
from conformance.zoo.verdict import Animal, Made, TimeOut, at_most
from conformance.zoo.workers_order import grouped
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from tests.training import Trained, differences, trained

Fresh = Callable[[], Made]

EXACT = 1e-9
LOSSES, TENSORS = 1e-5, 1e-4  # in float32
_NUDGES = 2  # runs on one device from weights changed in the last bits
_AS_MUCH = 4.0  # times what the larger of them changes a tensor


class Way(NamedTuple):
    """One comparison."""

    dtype: torch.dtype
    optimizer: Any

    @property
    def is_exact(self) -> bool:
        return self.dtype is torch.float64

    def limit(self, name: str) -> float:
        """How much a tensor may differ."""
        return EXACT if self.is_exact else LOSSES if name.startswith("loss") else TENSORS


DOUBLE, SINGLE = Way(torch.float64, torch.optim.AdamW), Way(torch.float32, torch.optim.AdamW)
PLAIN = Way(torch.float32, torch.optim.SGD)


class Case(NamedTuple):
    """What is compared."""

    way: Way
    fresh: Fresh
    pool: WorkerPool


def judge(animal: Animal, pool: WorkerPool, *, build: int, limit: int, hint: Any = None) -> results.Row:
    """The row of one model."""
    row: results.Row = {
        "cls": animal.cls, "status": "not buildable", "reason": "", "workers": len(pool.workers), **results.versions(),
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
    started = time.perf_counter()
    try:
        with at_most(limit):
            _compare(row, lambda: _again(animal, made, row["hint"]), pool)
    except TimeOut:
        slow = "dtype" not in row  # already on one device
        row.update(status="not trainable" if slow else "failed", reason=f"more than {limit} s" + " alone" * slow)
    except Exception as error:
        row.update(status="failed", reason=f"{type(error).__name__}: {error!s:.300}")
    row["seconds"] = round(time.perf_counter() - started, 2)
    return row


def _compare(row: results.Row, fresh: Fresh, pool: WorkerPool) -> None:
    found = _alone(fresh)
    if found is None:
        row.update(status="not trainable", reason="it does not train on one device either")
        return
    way, expected = found
    row["dtype"] = str(way.dtype).removeprefix("torch.")
    managed = _judge_one(row, "", Case(way, fresh, pool), expected)
    row["reason"] = "; ".join(filter(None, [row["reason"], *_refusals(managed)]))
    _count(row, managed)
    del managed
    _judge_one(row, "_sgd", Case(PLAIN, fresh, pool), _train(fresh, PLAIN))


def _judge_one(row: results.Row, key: str, case: Case, expected: Trained) -> ManagedModel:
    """Add one comparison to a row."""
    way = case.way
    used, given, named = _prepared(case.fresh, way.dtype)
    managed = ManagedModel(used, case.pool, quiet=True)
    dispatch.manage(used, managed)
    got = trained(used, given, named, way.optimizer)
    found = differences(expected, got, first_gradients=not way.is_exact)
    row[f"bits{key}"] = not any(found.values())
    beyond = {name: size for name, size in found.items() if size > way.limit(name)}
    if beyond or not row[f"bits{key}"]:
        row[f"order{key}"] = _is_order(case, [unit.name for unit in managed.remote_modules.values()], got)
    noise = {}
    if beyond:
        own = _own(beyond, case, expected)
        is_noise = lambda name: row[f"order{key}"] is True or beyond[name] <= _AS_MUCH * own[name]
        noise = {name: (size, own[name]) for name, size in beyond.items() if is_noise(name)}
    kept = {name: size for name, size in found.items() if name not in noise}
    place = max(kept, key=lambda name: kept[name] / way.limit(name), default="")
    row[f"worst{key}"], row[f"noise{key}"] = kept.get(place, 0.0), len(noise)
    if noise:
        name = max(noise, key=lambda one: noise[one][0])
        row[f"noisy{key}"] = f"{name}: {noise[name][0]:.0e}, on one device by last bits {noise[name][1]:.0e}"
    status = "different" if len(noise) < len(beyond) else "noise" if noise else "equal"
    if status == "different":
        row["reason"] = f"{place} with {way.optimizer.__name__}, {kept[place]:.0e}"
    row["status"] = max(row["status"], status, key=_RANK.index)
    return managed


_RANK = ("not buildable", "equal", "noise", "different")  # the worst of a row counts


def _is_order(case: Case, units: list[str], got: Trained) -> bool | str:
    """Whether one process that sums in the same order gives the same in every bit."""
    used, given, named = _prepared(case.fresh, case.way.dtype)
    try:
        with grouped(used, units, after=1):
            found = trained(used, given, named, case.way.optimizer)
    except Exception as error:  # the judge's own limit: another proof is needed
        return f"{type(error).__name__}: {error!s:.200}"
    return not any(differences(found, got).values())


def _own(names: Iterable[str], case: Case, expected: Trained) -> dict[str, float]:
    """What one device changes of tensors when the last bits of its weights are others."""
    own = dict.fromkeys(names, 0.0)
    for seed in range(_NUDGES):
        nudged = _train(case.fresh, case.way, nudge=seed + 1)
        found = differences(expected, nudged, first_gradients=not case.way.is_exact)
        own = {name: max(size, found.get(name, 0.0)) for name, size in own.items()}
    return own


def _refusals(managed: ManagedModel) -> list[str]:
    return [f"{name}: {why}" for name, why in list(managed.refused.items())[:3]]


def _again(animal: Animal, made: Made, hint: Any) -> Made:
    """The same model and inputs; made anew where they cannot be copied."""
    try:
        return copy.deepcopy(made)
    except Exception:
        return animal.make(hint)[0]


def _count(row: results.Row, managed: ManagedModel) -> None:
    root = managed.first_call.root if managed.first_call is not None else None
    total = (root.ms or root.inside_ms) if root is not None else 0.0
    row["used"] = len({unit.worker.index for unit in managed.remote_modules.values()})
    row["units"] = len(managed.remote_modules)
    row["elsewhere"] = round(sum(managed.traces[number].ms for number in managed.remote_modules) / max(total, 1e-9), 3)
    row["refused"] = len(managed.refused)
    row["demoted"] = managed.record.demotions


def _alone(fresh: Fresh) -> tuple[Way, Trained] | None:
    """The steps on one device, in the best precision that the model has kernels for."""
    for way in (DOUBLE, SINGLE):
        try:
            return way, _train(fresh, way)
        except Exception:
            continue
    return None


def _train(fresh: Fresh, way: Way, nudge: int = 0) -> Trained:
    used, given, named = _prepared(fresh, way.dtype)
    if nudge:
        source = torch.Generator().manual_seed(nudge)
        with torch.no_grad():
            for parameter in used.parameters():
                if parameter.is_floating_point():
                    signs = torch.randint(-1, 2, parameter.shape, generator=source).to(parameter.dtype)
                    parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)
    return trained(used, given, named, way.optimizer)


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
