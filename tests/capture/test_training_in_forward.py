"""A forward that trains is refused, since its optimizer state and gradients could not be restored."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini.capture import capture
from gemini.capture.nested_training import refuse_training
from gemini.errors import CaptureError


class Learner(nn.Module):
    """A model that makes its own steps, as meta-learners do."""

    def __init__(self, *, steps: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.net(x).square().mean()
        if self.steps:
            for parameter in self.net.parameters():
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()
        else:
            loss.backward()
        return loss.detach()

    def kept(self) -> list[float]:
        """How often each parameter was updated."""
        return [state["step"].item() for state in self.optimizer.state.values()]


@pytest.mark.parametrize(("steps", "said"), [(True, "makes a step of an optimizer"), (False, "calls backward()")])
def test_a_forward_that_trains_is_not_captured(steps: bool, said: str) -> None:
    model, x = Learner(steps=steps), torch.randn(4, 3)
    model(x)
    weights, kept = [one.detach().clone() for one in model.parameters()], model.kept()
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    with pytest.raises(CaptureError, match=f"its forward {said}".replace("(", r"\(").replace(")", r"\)")):
        capture(model, (x,))
    assert model.kept() == kept
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    assert all(
        torch.equal(one.grad, b) for one, b in zip(model.parameters(), gradients, strict=True) if one.grad is not None
    )
    model(x)  # and it may train as before
    assert not steps or model.kept() == [2.0] * 4


class Checkpointed(nn.Module):
    """Its backward runs one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(lambda y: self.first(y).tanh(), x, use_reentrant=True))


def test_a_backward_within_a_backward_is_allowed() -> None:
    assert not capture(Checkpointed(), (torch.randn(4, 3, requires_grad=True),)).is_whole


def test_captures_of_several_threads_may_overlap():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with refuse_training():
            entered.set()
            leave.wait(30)

    before = torch.Tensor.backward, torch.autograd.backward
    thread = threading.Thread(target=other)
    with refuse_training():
        thread.start()
        entered.wait(30)
    torch.ones(2, requires_grad=True).sum().backward()  # the other thread still refuses its own
    leave.set()
    thread.join()
    assert (torch.Tensor.backward, torch.autograd.backward) == before
