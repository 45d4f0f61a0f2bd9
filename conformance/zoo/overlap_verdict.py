"""Judging one model whose steps run by a plan: five SGD steps in four micro-batches against one process.

On shards three steps of AdamW, in one micro-batch where they are the only stage.

Compared are the losses of all steps, gradients of every step, weights and buffers at the end, and the state of the
generator: dropout is on. In float64 where the model has kernels for it, to 1e-9, a loss that the model takes in float32
to four times its last bit; else in float32, losses to 1e-5 and the rest to 1e-4. A gradient is measured by its own
largest entry, or by a millionth of the model's largest one where that is more: what is 0 but for rounding has no size
of its own. A weight is measured by itself, or by what steps with such a gradient move it: a bias that begins at 0, and
has no gradient but rounding, is rounding too.

Some models compute parts in float32 whatever their type. Sums over micro-batches then round otherwise than sums over
the batch: what differs in such a model must agree to 1e-5, a hundred of the last bits of float32, and is called so. A
gradient is then measured by a tenth of the largest one at least: rounding of the large ones reaches the small ones.

Steps amplify rounding: a choice of experts flips, a variance is near 0. Where only later steps differ — the first loss
and the first gradients must agree in any case — the model is trained on one device from weights changed at random in
their last bits (of float32 where it computes in float32), and what differs no more than ten times what that changes is
called *noise*.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from conformance.zoo import discovery, results
from conformance.zoo.verdict import Animal, TimeOut, at_most
from conformance.zoo.workers_verdict import _again, _prepared
from gemini.errors import ScheduleError
from gemini.ir.encode import tensors
from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_planner import plan_step
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pipelined.pipelined_model import PipelinedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import ModelJournal
from tests.training import difference

RATE = 1e-3
ROUNDED = 1e-5  # where float64 models compute in float32
COARSE = 0.1  # and what a gradient is measured by at least, of the largest: a weight near -1 is rounded as 1 + weight
NUDGES, AS_MUCH = 3, 10  # trainings from other last bits, and how much more than they a noisy tensor may differ
MOVED = 5 * RATE  # how far the steps move a weight whose gradient is 1
LIMITS = {torch.float64: (1e-9, 1e-9), torch.float32: (1e-5, 1e-4)}
Trained = dict[str, torch.Tensor | None]
_FIRST = "the first call "


@dataclass(frozen=True)
class Steps:
    """How a model is trained, and by which plan."""

    schedule: str = "auto"
    shards: int = 1
    pieces: int = 4
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    count: int = 5


def sharded_steps(schedule: str, workers: int, shards: int) -> Steps:
    """Return the steps of a sweep on so many workers, of which so many share a stage."""
    if shards == 1:
        return Steps(schedule)
    return Steps(schedule, shards, 1 if shards == workers else 4, torch.optim.AdamW, 3)


def objective(output: Any) -> torch.Tensor:
    """The model's own loss; without one, the mean square of everything differentiable that it returns.

    What has no dimensions is taken as it is: the terms of a loss, which programs add up.
    """
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor) and named.requires_grad and named.dim() == 0:
        return named
    parts = [part for _, part in tensors(output) if part.requires_grad and part.is_floating_point()]
    return torch.stack([part.pow(2).mean() if part.dim() else part for part in parts]).sum()


def judge(
    animal: Animal,
    pool: WorkerPool,
    *,
    build: int,
    limit: int,
    steps: Steps,
    hint: Any = None,
) -> results.Row:
    """The row of one model."""
    row: results.Row = {
        "cls": animal.cls, "status": "not buildable", "reason": "", "workers": len(pool.workers),
        "schedule": steps.schedule, **results.versions(),
        "code": results.digest(("capture", "runtime", "splitting", "planner", "codegen")),
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
            _compare(row, lambda: _again(animal, made, row["hint"]), pool, steps)
    except TimeOut:
        row.update(status="failed" if "dtype" in row else "not trainable", reason=f"more than {limit} s")
    except ScheduleError as error:  # a schedule that was asked for and does not exist for this model: the user is told
        row.update(status="no layout", reason=str(error).partition("\n")[0])
    except Exception as error:
        row.update(status="failed", reason=f"{type(error).__name__}: {error!s:.300}")
    row["seconds"] = round(time.perf_counter() - started, 2)
    return row


def _compare(row: results.Row, fresh: Any, pool: WorkerPool, steps: Steps) -> None:
    expected = None
    for dtype in LIMITS:
        try:
            expected = _train(*_prepared(fresh, dtype), steps)
            break
        except Exception as error:
            row["reason"] = f"{type(error).__name__}: {error!s:.100}"
    if expected is None:
        row.update(status="not trainable", reason="it does not train on one device either: " + row["reason"])
        return
    row.update(dtype=str(dtype).removeprefix("torch."), reason="")
    found = _judge(row, expected, _prepared(fresh, dtype), pool, steps, LIMITS[dtype])
    if row["status"] == "different" and dtype == torch.float64 and _casts(*_prepared(fresh, dtype)):
        row["float32_inside"] = True
        row["worst"], _ = _worst(expected, found, (1e-6, ROUNDED), COARSE)
        if row["worst"] <= 1:
            row.update(status="equal", reason="")
    if row["status"] == "different" and _is_noise(row, expected, found, fresh, dtype, steps):
        row.update(status="noise", reason="")


def _is_noise(  # noqa: PLR0917
    row: results.Row, expected: Trained, found: Trained, fresh: Any, dtype: torch.dtype, steps: Steps
) -> bool:
    """Whether all that differs is rounding that steps amplify: the first step agrees, and one device differs as much
    when the last bits of its weights are others."""
    inside = bool(row.get("float32_inside"))
    limits, floor = ((1e-6, ROUNDED), COARSE) if inside else (LIMITS[dtype], 1e-6)
    first = {key for key in expected if key.startswith(("loss 0", "gradient 0"))}
    if expected.keys() != found.keys() or not torch.equal(_state(expected), _state(found)):
        return False
    found_sizes = _sizes(expected, found, limits, floor)
    beyond = {key: size for key, size in found_sizes.items() if size > 1}
    if first & beyond.keys():
        return False
    eps = torch.finfo(torch.float32 if inside else dtype).eps
    own = dict.fromkeys(beyond, 0.0)
    for seed in range(NUDGES):
        sizes = _sizes(expected, _train(*_nudged(_prepared(fresh, dtype), eps, seed), steps), limits, floor)
        own = {key: max(size, sizes[key]) for key, size in own.items()}
    row["noisy"] = (
        f"{len(beyond)} tensors, at most {max(beyond[key] / max(own[key], 1e-30) for key in beyond):.1g} of own"
    )
    return all(size <= AS_MUCH * own[key] for key, size in beyond.items())


def _state(trained: Trained) -> torch.Tensor:
    generator = trained["generator"]
    assert generator is not None
    return generator


def _nudged(made: Any, eps: float, seed: int) -> Any:
    """The model with weights changed in their last bits."""
    model, args, kwargs = made
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + eps * (2 * torch.rand(parameter.shape, generator=chance, dtype=parameter.dtype) - 1))
    return model, args, kwargs


def _judge(  # noqa: PLR0917
    row: results.Row, expected: Trained, made: Any, pool: WorkerPool, steps: Steps,
    limits: tuple[float, float],
) -> Trained:  # fmt: skip
    model, args, kwargs = made
    managed = ManagedModel(model, pool, quiet=True, micro_batches=steps.pieces)
    story = ModelJournal(type(model).__name__, len(pool.workers))
    stages = len(pool.workers) // steps.shards
    wish = PlanRequest(stages, steps.pieces, schedule=steps.schedule, shards=steps.shards, cache=False)
    managed.pipelined = PipelinedModel(
        managed, lambda *call, **changes: plan_step(*call, replace(wish, **changes)), story
    )
    dispatch.manage(model, managed)
    found = _train(model, args, kwargs, steps)
    row["worst"], place = _worst(expected, found, limits)
    row["status"] = "equal" if row["worst"] <= 1 else "different"
    row["path"] = next((path for path in CallPath if story.steps.get(path)), CallPath.LOCAL)
    row["plan"], row["demoted"] = story.plan, managed.record.demotions
    reasons = [line.partition(": ")[2] for line in story.reasons]
    row["why"] = next((reason for reason in reasons if not reason.startswith(_FIRST)), "")
    row["reason"] = f"{place}: {row['worst']:.1e} times the limit" if row["status"] == "different" else ""
    return found


class _Casts(TorchFunctionMode):  # type: ignore[misc]
    """Notes whether anything differentiable is in float32."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.found |= isinstance(made, torch.Tensor) and made.dtype == torch.float32 and made.requires_grad
        return made


def _casts(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a model in float64 computes parts in float32 all the same."""
    with _Casts() as casts:
        model(*args, **kwargs)
    return casts.found


def _train(model: nn.Module, args: Any, kwargs: Any, steps: Steps) -> Trained:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    optimizer = steps.optimizer(model.parameters(), RATE)  # type: ignore[call-arg]
    seen: Trained = {}
    for step in range(steps.count):
        optimizer.zero_grad()
        loss = objective(model(*args, **kwargs))
        loss.backward()
        seen[f"loss {step}"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            seen[f"gradient {step} {name}"] = None if parameter.grad is None else parameter.grad.to_dense().clone()
        optimizer.step()
    seen |= {
        f"state {key}": value.detach().clone() for key, value in model.state_dict().items() if hasattr(value, "detach")
    }
    return {**seen, "generator": torch.get_rng_state()}


def _worst(
    one: dict[str, Any], other: dict[str, Any], limits: tuple[float, float], floor: float = 1e-6
) -> tuple[float, str]:
    """The largest difference in units of its limit, and where it is; `floor`: see COARSE."""
    if one.keys() != other.keys():
        return float("inf"), f"{sorted(one.keys() ^ other.keys())[:2]}"
    sizes = _sizes(one, other, limits, floor)
    place = max(sizes, key=sizes.__getitem__)
    return sizes[place], place if sizes[place] else ""


def _sizes(one: Trained, other: Trained, limits: tuple[float, float], floor: float) -> dict[str, float]:
    """The differences in units of their limits."""
    gradients = [value for key, value in one.items() if key.startswith("gradient") and value is not None]
    largest = max((float(value.abs().max()) for value in gradients if value.numel()), default=0.0)
    found = {}
    for key, value in one.items():
        least = floor * largest * (1.0 if key.startswith("gradient") else MOVED if key.startswith("state") else 0.0)
        found[key] = difference(value, other[key], least) / _limit(key, value, limits)
    return found


def _limit(key: str, value: torch.Tensor | None, limits: tuple[float, float]) -> float:
    """A model in float64 may take its loss in float32: that one is known to a few of its last bits."""
    if not key.startswith("loss") or value is None:
        return limits[1]
    return max(limits[0], 4 * torch.finfo(value.dtype).eps)
