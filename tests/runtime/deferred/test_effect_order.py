"""Side effects of deferred calls happen in program order: random numbers, buffers, parameters."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

from gemini.runtime.deferred import DeferredTensor, flush, pending_queue
from tests import models
from tests.runtime.deferred.rig import Session, compare


def loss_of(s: Session, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(s.model(x), s.y)


def own_numbers(s: Session) -> None:
    loss = loss_of(s, s.x)
    s.saw(torch.randn(3), torch.empty(2).uniform_())
    loss.backward()
    s.update()


def state_asked_for(s: Session) -> None:
    loss = loss_of(s, s.x)
    s.saw(torch.get_rng_state())
    with torch.random.fork_rng():
        s.saw(torch.rand(1))
    loss.backward()
    s.saw(torch.rand(1))


def seeded(s: Session) -> None:
    loss = loss_of(s, s.x)
    torch.manual_seed(1)
    s.saw(torch.rand(1))
    loss.backward()
    s.saw(torch.rand(1))


def shuffled(s: Session) -> None:
    loss = loss_of(s, s.x)
    for (batch,) in DataLoader(TensorDataset(s.x2), batch_size=3, shuffle=True):
        s.saw(batch)
    loss.backward()
    s.update()


def other_way_round(s: Session) -> None:
    first, second = loss_of(s, s.x), loss_of(s, s.x2)
    second.backward()
    first.backward()
    s.update()


def dropped(s: Session) -> None:
    s.model(s.x)
    loss_of(s, s.x2).backward()
    s.model(s.x)
    s.saw(torch.rand(1))
    s.update()


def buffers_looked_at(s: Session) -> None:
    loss = loss_of(s, s.x)
    s.saw(*(one.clone() for one in s.net.buffers()))
    loss.backward()
    s.update()


def state_dict_taken(s: Session) -> None:
    loss = loss_of(s, s.x)
    s.saw(*(one.clone() for one in s.net.state_dict().values()))
    loss.backward()
    s.update()


def evaluated_between(s: Session) -> None:
    loss = loss_of(s, s.x)
    s.net.eval()
    other = s.model(s.x2)
    s.net.train()
    loss.backward()
    s.saw(other.detach())
    s.update()


def rerun(s: Session) -> None:
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    s.saw(loss.item())
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    (loss + out.mean()).backward()
    s.saw(torch.rand(1))
    s.update()


def loaded(s: Session) -> None:
    out = s.model(s.x)
    s.net.load_state_dict({name: one + 1 for name, one in s.net.state_dict().items()})
    s.saw(out.detach())


def logged(s: Session) -> None:
    """What a program keeps of its loss, and reads when the loss itself is gone."""
    loss = loss_of(s, s.x)
    kept = loss.clone().detach().squeeze()
    s.saw(loss.item())
    loss.backward()
    del loss
    s.update()
    s.saw(kept.detach().clone())


PROGRAMS = [own_numbers, state_asked_for, seeded, shuffled, other_way_round, dropped, buffers_looked_at,
            state_dict_taken, evaluated_between, rerun, loaded, logged]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", ["dropout", "norm", "plain"])
def test_effects_come_in_order(program: Any, kind: str) -> None:
    facts = {"dropout": {"draws": True}, "norm": {"writes": True}, "plain": {}}[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(program, getattr(models, kind), "eager", **facts)


@pytest.mark.parametrize("program", PROGRAMS)
def test_effects_come_in_order_when_overlapped(program: Any) -> None:
    compare(program, models.dropout, "whole", draws=True)
    compare(program, models.norm, "whole", writes=True)


def test_numbers_drawn_unseen_are_told() -> None:
    s = Session(models.dropout(), "eager", draws=True)
    loss = loss_of(s, s.x)
    torch.default_generator.manual_seed(3)
    with pytest.warns(UserWarning, match="random numbers were drawn while a call of Sequential"):
        loss.backward()


def test_flush_makes_calls() -> None:
    s = Session(models.norm(), "eager", writes=True)
    before = s.net[1].num_batches_tracked.data_ptr(), int(s.net[1].num_batches_tracked)
    out = s.model(s.x)
    assert type(out) is DeferredTensor
    flush(s.net)
    assert type(out) is torch.Tensor
    assert int(s.net[1].num_batches_tracked) == before[1] + 1
    flush()


def test_a_call_without_effects_is_forgotten_with_its_outputs() -> None:
    s = Session(models.plain(), "eager")
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    assert len(pending_queue.waiting_calls()) == 1
    del out, loss
    assert not pending_queue.waiting_calls()
    assert s.runs == []


def stack() -> int:
    return torch._C._len_torch_function_stack()


def test_the_watch_is_there_only_while_calls_wait() -> None:
    s = Session(models.dropout(), "eager", draws=True)
    flush()
    assert stack() == 0
    loss = loss_of(s, s.x)
    assert stack() == 1
    loss.backward()
    assert stack() == 0


def test_modes_of_the_program_stay_its_own() -> None:
    class Counting(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.count += 1
            return func(*args, **(kwargs or {}))

    s = Session(models.plain(), "eager")
    with torch.device("cpu"):
        loss = loss_of(s, s.x)
        assert stack() == 2
    with Counting():
        loss.backward()
        assert stack() == 1
        torch.zeros(1)
    assert stack() == 0
    assert Counting.count > 0


def test_one_model_feeds_another() -> None:
    def chained(s: Session) -> None:
        hidden = s.model(s.x)
        out = s.model(torch.cat([hidden, hidden[:, :1]], 1))
        other = s.model(F.pad(hidden.tanh(), (0, 1)))
        loss = F.cross_entropy(out, s.y) + other.mean()
        loss.backward()
        s.saw(loss.detach())
        s.update()

    for mode in ("eager", "overlapped"):
        compare(chained, models.plain, mode)
