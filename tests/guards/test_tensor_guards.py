"""Changes of `requires_grad`, dtype and shape are detected in every mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

from gemini.guards import tensor_guards
from gemini.guards.tensor_guards import TensorFacts

Tensors = list[torch.Tensor]


def give(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


CHANGES: dict[str, Callable[[Tensors], object]] = {
    "frozen": lambda tensors: tensors[0].requires_grad_(False),
    "another type": lambda tensors: give(tensors[0], tensors[0].data.double()),
    "cut in its own memory": lambda tensors: give(tensors[1], tensors[1].data[:2]),
    "turned in its own memory": lambda tensors: give(tensors[0], tensors[0].data.t()),
    "one dimension more": lambda tensors: give(tensors[2], tensors[2].data[None]),
}
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "usual": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.fixture(params=[True, False], ids=["torch's check", "facts alone"])
def tensors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tensors:
    if not request.param:
        monkeypatch.setattr(tensor_guards, "TensorGuards", None)
    return [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(4)), torch.zeros(())]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(tensors: Tensors, change: str, mode: str) -> None:
    facts = TensorFacts(tensors)
    for _ in range(3):
        with MODES[mode]():
            assert facts.hold()
        assert facts.hold()
    CHANGES[change](tensors)
    with MODES[mode]():
        assert not facts.hold()


def test_other_memory_and_another_layout_are_no_change(tensors: Tensors) -> None:
    facts = TensorFacts(tensors)
    for data in (torch.ones(3, 4), torch.ones(4, 3).t(), torch.ones(3, 4)):
        assert facts.hold()
        give(tensors[0], data)
        assert facts.hold()


def test_a_sparse_tensor_is_looked_at_as_well(tensors: Tensors) -> None:
    tensors.append(torch.eye(3).to_sparse())
    facts = TensorFacts(tensors)
    assert facts.hold()
    assert facts.hold()
    tensors[0].requires_grad_(False)
    assert not facts.hold()


def test_torch_s_check_is_used() -> None:
    facts = TensorFacts([nn.Parameter(torch.zeros(3))])
    assert facts.hold()
    assert all(facts._guards.values())
