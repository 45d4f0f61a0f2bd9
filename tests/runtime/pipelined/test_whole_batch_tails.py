"""Losses and final layers that compare samples run on the whole batch after micro-batched stages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini.batch_analysis.microbatch_join import Tail
from gemini.codegen.stage_interface import Interface
from gemini.errors import InvalidPlanError
from gemini.planner.plan_request import PlanRequest
from gemini.planner.step_planner import plan_step
from gemini.planner.tail_plan import put_forwards_first
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.schedule.block import FORWARD
from gemini.schedule.device_orders import plan_from_orders
from gemini.schedule.library import LIBRARY
from gemini.schedule.placements import placement
from gemini.step.worker_program import make_program
from tests.programs.pipelined_runs import manage

Loss = Callable[[nn.Module, Any], torch.Tensor]
WIDTH = 12


class Tower(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.Dropout(dropout))
        self.second = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.second(self.first(x)), dim=-1)


class Pair(nn.Module):
    """Two towers that meet in a table of similarities; half of it is run again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        a, b = self.left(a), checkpoint(self.right, b, use_reentrant=False)
        table = a @ b.t() * self.scale.exp()
        labels = torch.arange(len(a))
        loss = (F.cross_entropy(table, labels) + F.cross_entropy(table.t(), labels)) / 2
        return {"loss": loss, "table": table, "left": a}


class Balanced(Tower):
    """A mean over samples, and a penalty on what the batch looks like: both in one loss."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.second(self.first(x))
        spread = hidden.softmax(-1).mean(0)
        return F.cross_entropy(hidden, y) + 0.1 * (spread * spread.log()).sum(), hidden


class Normed(Tower):
    """Drawing, and a head of its own, after samples have met."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        found = F.dropout(found - found.mean(0), 0.3, self.training)
        return self.head(found)


class Late(Tower):
    """Statistics over the batch at the end, and an average of what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.norm(super().forward(x))
        self.seen.mul_(0.9).add_(found.detach().square().mean(0), alpha=0.1)
        return self.head(found / (1 + self.seen))


class Sized(Tower):
    """Numbers of samples, from arguments and from what only micro-batches see; samples in the second dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        found = F.normalize(self.second(hidden), dim=-1).t()
        table = found.t() @ found * (hidden.shape[0] / 8)
        return table.log_softmax(-1)[torch.arange(x.shape[0]), torch.arange(x.shape[0]).flip(0)]


class Frozen(Normed):
    """Only what follows the meeting is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.second.requires_grad_(False)


def pairs(step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(step)
    a, b = (torch.randn(samples, 9, generator=chance, dtype=torch.float64) for _ in range(2))
    return a.requires_grad_(), b


def inside(model: nn.Module, given: Any) -> torch.Tensor:
    return model(*given)["loss"]


def also_outside(model: nn.Module, given: Any) -> torch.Tensor:
    found = model(*given)
    return found["loss"] / 2 + found["table"].square().mean() + found["left"].abs().sum()


def contrast(model: nn.Module, given: Any) -> torch.Tensor:
    found = model(given[0])
    return F.cross_entropy(found @ found.t() / 0.1, torch.arange(len(found)).roll(1))


def read_early(model: nn.Module, given: Any) -> torch.Tensor:
    loss = contrast(model, given)
    assert loss.item() > 0
    return loss / 3


def distances(model: nn.Module, given: Any) -> torch.Tensor:
    return torch.pdist(model(given[0])).add(1).log().mean()


def labelled(model: nn.Module, given: Any) -> torch.Tensor:
    loss, hidden = model(given[0], torch.arange(len(given[0])) % 3)
    return loss + hidden.std(0).sum()


def plain(model: nn.Module, given: Any) -> torch.Tensor:
    return model(given[0]).square().sum(1).mean()


def summed(model: nn.Module, given: Any) -> torch.Tensor:
    return -model(given[0]).sum() / 3


def train(model: nn.Module, loss: Loss, sizes: tuple[int, ...]) -> list[Any]:
    torch.manual_seed(3)
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number, size in enumerate(sizes):
        given = pairs(number, size)
        found = loss(model, given)
        optimizer.zero_grad()
        found.backward()
        seen += [
            found.detach(),
            given[0].grad,
            torch.rand(1),
            *(p.grad.clone() for p in model.parameters() if p.requires_grad),
        ]
        optimizer.step()
    return seen


def compare(model: nn.Module, loss: Loss, sizes: tuple[int, ...], pool: WorkerPool, schedule: str = "auto") -> Any:
    torch.manual_seed(1)
    model = model.double()
    reference = copy.deepcopy(model)
    expected = train(reference, loss, sizes)
    story = manage(model, pool, schedule)
    for one, other in zip(train(model, loss, sizes), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    for one, other in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    return story


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (Tower, contrast),
        (Tower, read_early),
        (Tower, distances),
        (Pair, inside),
        (Pair, also_outside),
        (Balanced, labelled),
        (Normed, plain),
        (Late, plain),
        (Sized, summed),
        (Frozen, plain),
    ],
)
def test_trains_as_one_process(make: type[nn.Module], loss: Loss, pool: WorkerPool) -> None:
    story = compare(make(), loss, (8, 8, 8, 5, 5, 8), pool)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 3, str(story)
    assert CallPath.SINGLE_MICROBATCH not in story.steps, str(story)
    assert any("the loss is computed on the whole batch" in reason for reason in story.reasons), str(story)
    assert "the loss on the whole batch" in story.plan


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_v", marks=pytest.mark.slow)])
def test_a_schedule_that_was_asked_for(schedule: str, pool: WorkerPool) -> None:
    story = compare(Pair(), inside, (8, 8, 8, 8), pool, schedule)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 1, str(story)


def test_the_same_outputs_serve_a_loss_that_splits_and_one_that_does_not(pool: WorkerPool) -> None:
    calls = iter(range(100))

    def either(model: nn.Module, given: Any) -> torch.Tensor:
        return (contrast if next(calls) % 3 else plain)(model, given)

    story = compare(Tower(), either, (8,) * 9, pool)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 6, str(story)
    whole = sum(count for reason, count in story.reasons.items() if "on the whole batch" in reason)
    assert 0 < whole < story.steps[CallPath.OVERLAPPED], str(story)


class Early(nn.Module):
    """Samples meet at once: all that follows would be on the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(9, 9), Tower(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.rest(x - x.mean(0).sin())


def test_samples_that_meet_early_leave_the_batch_whole(pool: WorkerPool) -> None:
    story = compare(Early(), plain, (8, 8, 8, 8), pool)
    assert story.steps.get(CallPath.SINGLE_MICROBATCH, 0) >= 1, str(story)
    assert CallPath.OVERLAPPED not in story.steps, str(story)


class Writing(Tower):
    """The end writes to what was made before samples met."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = super().forward(x)
        seen = found * 1
        seen -= (found @ found.t()).mean(1, keepdim=True)
        return found, seen


def both(model: nn.Module, given: Any) -> torch.Tensor:
    first, second = model(given[0])
    return first.square().sum(1).mean() + second.square().sum(1).mean()


def test_what_the_end_writes_to_is_made_there(pool: WorkerPool) -> None:
    story = compare(Writing(), both, (8, 8, 8, 8), pool)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 1, str(story)


def test_plans_go_forward_with_all_micro_batches_first() -> None:
    plan = plan_step(Pair(), pairs_of_floats(), {}, PlanRequest(2, 4, cache=False, gather_reason="a loss"))
    assert plan.tail is not None
    assert plan.micro_batches == 4
    names = {plan.graph.nodes[node].name for node in plan.tail.nodes}
    assert "matmul" in names
    assert not any(name.startswith(("left.", "right.")) for name in names), names
    for device in range(plan.schedule.ndevs):
        kinds = [block.btype == FORWARD for block in plan.schedule.device_blocks(device)]
        assert kinds == sorted(kinds, reverse=True)


def test_forwards_first_takes_the_memory_of_all_micro_batches() -> None:
    one = placement("vshape", 3)
    plan = plan_from_orders(one, LIBRARY["1f1b"].orders(one, 5))
    found = put_forwards_first(plan, 7)
    gradients = [found.step(block) for block in found if block.btype != FORWARD]
    forwards = [found.step(block) + block.span for block in found if block.btype == FORWARD]
    assert min(gradients) == max(forwards) + 7
    assert found.peak_memory(0) == 5 * max(block.memory for block in one)
    plan.memory = tuple(plan.peak_memory(device) for device in range(3))
    with pytest.raises(InvalidPlanError, match="memory"):
        put_forwards_first(plan, 7)


def test_an_order_that_does_not_wait_for_all_samples_is_refused() -> None:
    interfaces = [Interface(stage, stage, (), ()) for stage in range(2)]
    orders = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    with pytest.raises(InvalidPlanError, match="put all forwards first"):
        make_program(interfaces, orders, tail=Tail(None, {}))


def pairs_of_floats() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 9), torch.randn(8, 9)


@pytest.mark.parametrize("make", [Pair, pytest.param(Normed, marks=pytest.mark.slow)])
def test_evaluation(make: type[nn.Module], pool: WorkerPool) -> None:
    torch.manual_seed(1)
    model = make().double()
    reference, seen = copy.deepcopy(model), []
    story = manage(model, pool)
    for one in (reference, model):
        torch.manual_seed(2)
        with torch.no_grad():
            for step in range(4):
                found = one(*pairs(step, 8)[: 2 if make is Pair else 1])
                seen.append((found, torch.rand(1)))
    for one, other in zip(seen[:4], seen[4:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 2, str(story)


class Picky(Pair):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(a, b)
        found["loss"] = F.cross_entropy(found["table"], b[:, 0].abs().long() * 1000)
        return found


def test_what_the_end_raises_is_raised(pool: WorkerPool) -> None:
    torch.manual_seed(1)
    model = Picky().double()
    story = manage(model, pool)
    for step in range(4):
        a, b = pairs(step, 8)
        with torch.no_grad():
            b.clamp_(-0.9, 0.9)
        model(a, b)["loss"].backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(IndexError):
        model(a, b * 5)["loss"].backward()
    for one, other in zip(model.parameters(), before, strict=True):
        assert torch.equal(one.grad, other)
    assert story.steps.get(CallPath.OVERLAPPED, 0) >= 2, str(story)
