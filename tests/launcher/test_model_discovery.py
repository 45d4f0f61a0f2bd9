"""Models are discovered by how a program uses them, whatever their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gemini.launcher.model_discovery import ModelDiscovery
from gemini.runtime.interception import dispatch

CALL = nn.Module.__call__


class Noting:
    """Decides that models run here, and notes them."""

    is_lasting = True

    def __init__(self) -> None:
        self.met: list[nn.Module] = []

    def refuses_compiled(self, model: nn.Module) -> bool:
        return False

    def decide(self, model: nn.Module) -> bool:
        self.met.append(model)
        return False


@pytest.fixture
def found() -> Iterator[ModelDiscovery]:
    before, nn.Module.__call__ = nn.Module.__call__, CALL  # other tests of this process may have models in workers
    yield ModelDiscovery(Noting())
    nn.Module.__call__ = before


def net(inputs: int = 4, outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))


def met(found: ModelDiscovery) -> list[nn.Module]:
    decider: Any = found.policy
    return decider.met


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def test_the_outermost_module_that_holds_trained_parameters(found: ModelDiscovery) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Whole()
    found.register_optimizer(sgd(model))
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert met(found) == []
    model(torch.randn(2, 4))
    model(torch.randn(2, 4))
    assert met(found) == [model]
    assert nn.Module.__call__ is CALL  # nothing is open: no overhead is left


def test_several_models_and_a_teacher(found: ModelDiscovery) -> None:
    generator, critic, teacher = net(), net(), net()
    found.register_optimizer(sgd(generator))
    found.register_optimizer(sgd(critic))
    teacher(generator(torch.randn(2, 4)))
    critic(torch.randn(2, 4))
    assert met(found) == [generator, critic]


def test_a_second_optimizer_opens_a_model_that_was_passed_over(found: ModelDiscovery) -> None:
    first, second = net(), net()
    found.register_optimizer(sgd(first))
    second(torch.randn(2, 4))
    first(torch.randn(2, 4))
    found.register_optimizer(sgd(second))
    second(torch.randn(2, 4))
    assert met(found) == [first, second]


def _parallel(model: nn.Module) -> Callable[..., Any]:
    return nn.DataParallel(model)


def _compiled(model: nn.Module) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(model, backend="eager")
    return compiled


def _through_a_method(model: nn.Module) -> Callable[..., Any]:
    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    return Task().training_step


@pytest.mark.parametrize("wrap", [_parallel, _compiled, _through_a_method])
def test_wrappers_are_looked_through(wrap: Callable[[nn.Module], Callable[..., Any]], found: ModelDiscovery) -> None:
    model = net()
    call = wrap(model)
    found.register_optimizer(sgd(model))
    x = torch.randn(2, 4)
    assert torch.equal(call(x), model(x))
    assert met(found) == [model]


def test_layers_and_parameters_alone_are_no_models(found: ModelDiscovery) -> None:
    layer, image = nn.Linear(4, 4), nn.Parameter(torch.zeros(3))
    found.register_optimizer(torch.optim.SGD([*layer.parameters(), image], lr=0.1))
    layer(torch.randn(2, 4))
    assert met(found) == []


def test_without_an_optimizer_whatever_learns_is_trained(found: ModelDiscovery) -> None:
    model, frozen = net(), net().requires_grad_(requires_grad=False)
    found.register_all()
    frozen(model(torch.randn(2, 4)))
    assert met(found) == [model]


def test_objects_that_are_gone_leave_nothing_behind(found: ModelDiscovery) -> None:
    model = net()
    found.register_optimizer(sgd(model))
    model(torch.randn(2, 4))
    met(found).clear()
    del model
    assert not found._settled
    assert not found._open


def test_a_model_that_was_called_by_functional_call_first(found: ModelDiscovery) -> None:
    model, x = net(), torch.randn(2, 4)
    found.register_optimizer(sgd(model))
    weights = {name: one.detach() for name, one in model.named_parameters()}
    torch.func.functional_call(model, weights, (x,))
    torch.func.vmap(lambda one: torch.func.functional_call(model, dict(model.named_parameters()), (one,)))(x)
    assert met(found) == []
    model(x)
    assert met(found) == [model]


def test_a_module_that_is_added_to_a_managed_model_is_a_part_of_it(found: ModelDiscovery, monkeypatch: Any) -> None:
    model, other = net(), net()
    found.register_optimizer(sgd(model))
    found.settle(model, managed=True)
    model.append(net())
    found.register_optimizer(sgd(model))
    found.register_optimizer(sgd(other))
    monkeypatch.setattr(dispatch, "_state", dispatch._DispatchState())
    dispatch._state.model = model
    model[-1](torch.randn(2, 4))
    assert not met(found)
    other(torch.randn(2, 4))
    assert met(found) == [other]
