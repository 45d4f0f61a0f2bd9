"""Hooks on modules inside a model run in the program's process, once a call: there is no plan for such a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from gemini.planner.planning import Wish, plan_step
from gemini.planner.step_plan import UnplannableError

seen: list[Any] = []
Register = Callable[[nn.Module], Any]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def note(*given: Any, **_: Any) -> None:
    seen.append(given)


WISH = Wish(workers=2, micro_batches=2)
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
    with pytest.raises(UnplannableError, match="hooks of the program hang on 2"):
        plan_step(model, (torch.randn(8, 6),), {}, WISH)
    assert not seen


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*")
def test_hooks_that_make_weights_do_not_matter() -> None:
    model = net()
    spectral_norm(model[0])
    parametrizations.weight_norm(model[2])
    prune.l1_unstructured(model[4], "weight", 0.5)
    assert plan_step(model, (torch.randn(8, 6),), {}, WISH).micro_batches >= 1
