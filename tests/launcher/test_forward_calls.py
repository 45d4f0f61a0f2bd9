"""`net.forward(x)` in a script counts as a call of the model where both are equivalent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gemini.launcher import script_api as managed
from gemini.launcher.script_api import forward_calls


@pytest.fixture
def space() -> Iterator[Any]:
    forward_calls.enable_module_calls()
    yield managed
    forward_calls.disable_module_calls()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that are called."""
    found: list[nn.Module] = []
    call = nn.Module.__call__

    def noting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.append(module)
        return call(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", noting)
    return found


def test_it_is_a_call_of_the_module(space: Any, seen: list[nn.Module]) -> None:
    net, x = nn.Linear(2, 3), torch.ones(1, 2)
    assert torch.equal(space.called(net).forward(x), net.forward(x))
    assert seen == [net]


def test_hooks_do_not_run(space: Any, seen: list[nn.Module]) -> None:
    net, x = nn.Linear(2, 3), torch.ones(1, 2)
    hook = net.register_forward_hook(lambda *_: torch.zeros(1, 3))
    assert not torch.equal(space.called(net).forward(x), torch.zeros(1, 3))
    hook.remove()
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: torch.zeros(1, 3))
    try:
        assert not torch.equal(space.called(net).forward(x), torch.zeros(1, 3))
    finally:
        everywhere.remove()
    assert seen == []


def test_a_call_of_its_own_is_not_made(space: Any) -> None:
    class Counts(nn.Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    assert space.called(Counts(2, 3)).forward(torch.ones(1, 2)).shape == (1, 3)


def test_what_is_no_module_stays_as_it_is(space: Any) -> None:
    for value in (3, "text", nn.Linear, torch.ones(2)):
        assert space.called(value) is value


def test_nothing_happens_where_no_models_are_looked_for(seen: list[nn.Module]) -> None:
    net = nn.Linear(2, 3)
    assert managed.called(net) is net


@pytest.mark.slow  # imports torch's compiler
def test_compiled_code_is_followed(space: Any) -> None:
    net = nn.Linear(2, 3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = space.called(net).forward(x)
        return made.sum()

    x = torch.ones(1, 2)
    torch.testing.assert_close(torch.compile(loss, backend="eager", fullgraph=True)(x), loss(x))
