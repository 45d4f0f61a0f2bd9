"""A model with hooks on inner modules has no plan: its hooks run once per call, in the controller."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_plan import UnplannableError
from gemini.planner.step_planner import plan_step

seen: list[Any] = []
Register = Callable[[nn.Module], Any]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def note(*given: Any, **_: Any) -> None:
    seen.append(given)


WISH = PlanRequest(workers=2, micro_batches=2)
HOOKS: dict[str, Register] = {
    "forward": lambda module: module.register_forward_hook(note),
    "partial": lambda module: module.register_forward_hook(partial(note, 1)),
    "before": lambda module: module.register_forward_pre_hook(note),
    "backward": lambda module: module.register_full_backward_hook(note),
    "before backward": lambda module: module.register_full_backward_pre_hook(note),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_there_is_no_plan_and_no_call(register: Register) -> None:
    model = net()
    register(model[2])
    seen.clear()
    with pytest.raises(UnplannableError, match="the script has hooks on 2"):
        plan_step(model, (torch.randn(8, 6),), {}, WISH)
    assert not seen


MAKE_WEIGHTS: dict[str, Register] = {
    "spectral_norm": spectral_norm,
    "pruning": lambda module: prune.l1_unstructured(module, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*_norm.*")
@pytest.mark.parametrize("make", MAKE_WEIGHTS.values(), ids=MAKE_WEIGHTS.keys())
def test_weights_that_hooks_leave_in_attributes_stay_with_the_program(make: Register) -> None:
    model = net()
    make(model[2])
    with pytest.raises(UnplannableError, match=r"a hook of torch\.nn\.utils computes a weight in every call of 2"):
        plan_step(model, (torch.randn(8, 6),), {}, WISH)


@pytest.mark.filterwarnings("ignore:.*_norm.*")
@pytest.mark.parametrize("normalize", [parametrizations.weight_norm, weight_norm])
def test_normalized_weights_are_planned_for(normalize: Register) -> None:
    model = net()
    normalize(model[2])
    assert plan_step(model, (torch.randn(8, 6),), {}, WISH).micro_batches >= 1
