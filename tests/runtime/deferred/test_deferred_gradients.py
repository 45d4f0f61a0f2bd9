"""Gradients of a deferred step arrive once, without a copy, and are freed as torch frees them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from gemini.runtime.deferred import DeferredTensor, StepResult
from tests import models
from tests.runtime.deferred.rig import Session


def _session(mode: str = "overlapped") -> Session:
    torch.manual_seed(3)
    return Session(models.plain(), mode)


def test_gradients_are_handed_over_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    s = _session()
    found: list[int] = []
    inner = s.run_pipelined

    def overlapped(*args: object) -> StepResult | None:
        result = inner(*args)  # type: ignore[arg-type]
        assert result is not None
        found.extend(one.data_ptr() for one in result.parameters if one is not None)
        return result

    monkeypatch.setattr(s, "run_pipelined", overlapped)
    F.cross_entropy(s.model(s.x), s.y).backward()
    assert [one.grad.data_ptr() for one in s.net.parameters()] == found


def test_scaled_gradients_need_no_copy_either(monkeypatch: pytest.MonkeyPatch) -> None:
    s = _session()
    found: list[int] = []
    inner = s.run_pipelined

    def overlapped(*args: object) -> StepResult | None:
        result = inner(*args)  # type: ignore[arg-type]
        assert result is not None
        found.extend(one.data_ptr() for one in result.parameters if one is not None)
        return result

    monkeypatch.setattr(s, "run_pipelined", overlapped)
    loss = F.cross_entropy(s.model(s.x), s.y)
    loss.item()
    (loss / 4).backward()
    assert [one.grad.data_ptr() for one in s.net.parameters()] == found


def test_second_backward_raises_what_torch_raises() -> None:
    s = _session()
    loss = F.cross_entropy(s.model(s.x), s.y)
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


def _forgotten(s: Session, use: object) -> None:
    """Calls of which nothing is left: neither the call nor what it was given."""
    gc.collect()
    gc.disable()
    try:
        out = s.model(s.x)
        pending = weakref.ref(out._pending)
        use(out)  # type: ignore[operator]
        del out
        assert pending() is None
    finally:
        gc.enable()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["eager", "overlapped", "nothing"])
def test_nothing_is_left_of_a_step(mode: str) -> None:
    s = _session(mode)

    def usual(out: torch.Tensor) -> None:
        F.cross_entropy(out, s.y).backward()

    def reading(out: torch.Tensor) -> None:
        loss = F.cross_entropy(out, s.y)
        loss.item()
        out.sum().item()

    def both(out: torch.Tensor) -> None:
        loss = F.cross_entropy(out, s.y)
        loss.item()
        (loss + out.pow(2).mean()).backward()

    def hooked(out: torch.Tensor) -> None:
        loss = F.cross_entropy(out, s.y)
        loss.item()
        out.retain_grad()
        loss.backward()

    for use in (usual, reading, both, hooked, lambda out: None, lambda out: F.cross_entropy(out, s.y)):
        s._runners.clear()
        _forgotten(s, use)


def test_the_snapshot_is_freed_with_the_graph() -> None:
    s = _session()
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    pending = weakref.ref(loss._pending)
    loss.backward()
    del out
    assert pending() is None  # though the loss is still there


def test_a_deferred_tensor_becomes_an_ordinary_one() -> None:
    s = _session()
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    assert type(out) is DeferredTensor
    assert type(loss) is DeferredTensor
    loss.backward()
    assert type(loss) is torch.Tensor
    out.sum().item()
    s2 = _session("eager")
    out = s2.model(s2.x)
    out.tolist()
    assert type(out) is torch.Tensor
    assert out.grad_fn is not None


def test_gradients_of_parameters_that_are_not_used_stay_none() -> None:
    torch.manual_seed(0)
    s = Session(models.pair(), "overlapped")
    a, _ = s.model(s.x)
    a.sum().backward()
    assert s.net.b.weight.grad is None
    assert s.net.a.weight.grad is not None
