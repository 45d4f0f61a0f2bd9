"""The version object of a model changes exactly when any of its modules changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gemini.guards.model_version import ModelContents, read_contents


class Block(nn.Module):
    """Attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.names = nn.Linear(4, 4), 1, [1000, 2000]
        self.register_buffer("count", torch.zeros(3))


def model() -> nn.Module:
    """With a module inside another."""
    return nn.Sequential(nn.Linear(4, 4), Block(), nn.Dropout(0.5))


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a mode": lambda one: one[2].eval(),
    "an attribute": lambda one: setattr(one[2], "p", 0.25),
    "an attribute of an equal value": lambda one: setattr(one[1], "scale", True),
    "an equal list": lambda one: setattr(one[1], "names", [1000, 2000]),
    "a new attribute": lambda one: setattr(one[1], "more", None),
    "an attribute less": lambda one: delattr(one[1], "scale"),
    "a hook": lambda one: one[0].register_forward_hook(lambda *_: None),
    "a hook of a backward": lambda one: one[1].inner.register_full_backward_hook(lambda *_: None),
    "a hook written into a table": lambda one: one[1]._forward_hooks.update({7: lambda *_: None}),
    "a frozen parameter": lambda one: one[1].inner.weight.requires_grad_(False),
    "another type": lambda one: one[0].half(),
    "another parameter": lambda one: setattr(one[0], "weight", nn.Parameter(one[0].weight.detach())),
    "another buffer": lambda one: setattr(one[1], "count", torch.zeros(3)),
    "another module": lambda one: setattr(one[1], "inner", nn.Linear(4, 4)),
    "a module less": lambda one: one.pop(0),
    "another table": lambda one: one[1].__dict__.update(_buffers=dict(one[1]._buffers)),
    "another forward": lambda one: one[0].__dict__.update(forward=lambda x: x),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    one = model()
    roster = ModelContents(one)
    before = roster.state
    assert before is not None
    assert before.holds()
    CHANGES[change](one)
    assert not before.holds()
    after = read_contents(one, roster)
    assert after.state is not None
    assert after.state is not before
    assert after.state.holds()
    assert [*map(id, after.modules)] == [*map(id, one.modules())]
    assert [*map(id, after.parameters)] == [*map(id, one.parameters())]


def test_hooks_that_are_put_aside_and_put_back_are_seen() -> None:
    """Without any new hook, and in a model that had none when it was seen first."""
    one = model()
    roster = ModelContents(one)
    one[0].register_forward_hook(lambda *_: None)
    aside = dict(one[0]._forward_hooks)
    states = [read_contents(one, roster).state]
    one[0]._forward_hooks.clear()
    states.append(read_contents(one, roster).state)
    one[0]._forward_hooks.update(aside)
    states.append(read_contents(one, roster).state)
    assert len({*map(id, states)}) == 3
    torch.zeros(1, requires_grad=True).register_hook(lambda _: None)  # a hook on something else
    assert read_contents(one, roster).state is states[-1]


def test_contents_are_no_change() -> None:
    """A step of an optimizer, a count, a gradient: the state is what it was, and so is the roster."""
    one = model()
    roster = ModelContents(one)
    before = roster.state
    one[1].inner(torch.randn(2, 4)).sum().backward()
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    one[1].count.add_(1)
    one[0].weight.data = one[0].weight.data.clone()
    assert read_contents(one, roster) is roster
    assert roster.state is before


def test_modes_there_and_back_are_another_state() -> None:
    """What was found out in between must not be taken for what holds now."""
    one = model()
    roster = ModelContents(one)
    before = roster.state
    one.eval()
    between = read_contents(one, roster).state
    one.train()
    assert read_contents(one, roster).state not in (before, between)


def test_modules_that_are_not_the_model_s_are_not_covered() -> None:
    one, stranger = model(), nn.Linear(2, 2)
    state = ModelContents(one).state
    assert state is not None
    assert state.covers(one.modules())
    assert not state.covers([one[0], stranger])
