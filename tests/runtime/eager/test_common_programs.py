"""Programs with common uses of a model give the same results with remote modules."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.wrapped_models import Block, Net, Program, Wrap, batch, check, step, weights

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def optimizers() -> list[type]:
    plain = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam]
    return [*plain, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD,
            torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adafactor]  # fmt: skip


@program
def every_optimizer(wrap: Wrap) -> Any:
    seen = []
    for cls in optimizers():
        torch.manual_seed(1)
        model = wrap(Net())
        optimizer = cls(model.parameters(), lr=1e-3)
        seen += [[step(model, optimizer) for _ in range(3)], weights(model)]
    return seen


@program
def closures(wrap: Wrap) -> Any:
    model = wrap(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x, y = batch()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return [float(optimizer.step(closure)) for _ in range(2)], weights(model)


@program
def optimizer_made_before(wrap: Wrap) -> Any:
    model = Net()
    groups = [{"params": model.head.parameters(), "lr": 0.1}, {"params": model.blocks.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    model = wrap(model)
    losses = []
    for _ in range(4):
        losses.append(step(model, optimizer))
        schedule.step()
    return losses, weights(model)


@program
def clipping_and_accumulation(wrap: Wrap) -> Any:
    model = wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(3):
            x, y = batch()
            (F.cross_entropy(model(x), y) / 3).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return norms, weights(model)


@program
def evaluation_between_steps(wrap: Wrap) -> Any:
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for _ in range(3):
        seen.append(step(model, optimizer))
        model.eval()
        with torch.no_grad():
            seen.append(model(batch()[0]))
        with torch.inference_mode():
            seen.append(model(batch()[0]).clone())
        model.train()
    return seen, weights(model)


@program
def frozen_then_thawed(wrap: Wrap) -> Any:
    model = wrap(Net())
    model.blocks.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = [step(model, optimizer) for _ in range(2)]
    model.blocks[2].requires_grad_(True)
    seen += [step(model, optimizer) for _ in range(2)]
    return seen, weights(model), [p.grad is None for p in model.parameters()]


@program
def gradients_of_inputs(wrap: Wrap) -> Any:
    model = wrap(Net())
    seen = []
    for _ in range(3):
        x = batch()[0].requires_grad_()
        seen += torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    return seen, [p.grad for p in model.parameters()]


@program
def twice_through_one_graph(wrap: Wrap) -> Any:
    model = wrap(Net())
    seen = []
    for _ in range(3):
        out = model(batch()[0])
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
        seen += [p.grad.clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()
        model.zero_grad()
    return seen


@program
def gradient_penalty(wrap: Wrap) -> Any:
    model = wrap(Net())
    seen = []
    for _ in range(3):
        x = batch()[0].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
    return seen


@program
def several_calls_before_backward(wrap: Wrap) -> Any:
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = [model(batch()[0]) for _ in range(3)]
        sum(out.square().mean() for out in outputs).backward()
        optimizer.step()
    return weights(model)


@program
def adversaries(wrap: Wrap) -> Any:
    maker, judge = wrap(Net(16, 16)), wrap(Net(16, 1))
    first, second = torch.optim.Adam(maker.parameters(), 1e-3), torch.optim.Adam(judge.parameters(), 1e-3)
    for _ in range(3):
        second.zero_grad()
        noise = torch.randn(12, 16)
        (judge(maker(noise).detach()).mean() - judge(torch.randn(12, 16)).mean()).backward()
        second.step()
        first.zero_grad()
        (-judge(maker(noise)).mean()).backward()
        first.step()
    return weights(maker), weights(judge)


@program
def mixed_precision(wrap: Wrap) -> Any:
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    seen = []
    for _ in range(3):
        x, y = batch()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        seen.append(loss.item())
    return seen, weights(model)


@program
def moving_average(wrap: Wrap) -> Any:
    model = wrap(Net())
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        step(model, optimizer)
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    return average(batch()[0]), weights(average), weights(model)


@program
def weights_written_by_hand(wrap: Wrap) -> Any:
    model = wrap(Net())
    seen = []
    for at in range(4):
        seen.append(model(batch()[0]))
        with torch.no_grad():
            model.head.weight.mul_(1.5)
            model.blocks[0].up.weight.data = torch.full_like(model.blocks[0].up.weight, 0.01 * at)
            model.blocks[1].up.weight.data.zero_()
    model.blocks[3] = Block(16)
    return [*seen, model(batch()[0]), model(batch()[0])]


@program
def gradients_written_by_hand(wrap: Wrap) -> Any:
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        x, y = batch()
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.grad.mul_(0.5).add_(0.01)
        optimizer.step()
    return weights(model)


@program
def settings_changed_on_the_way(wrap: Wrap) -> Any:
    model = wrap(Net())
    seen = []
    for rate in (0.1, 0.1, 0.5, 0.0, 0.9):
        for block in model.blocks:
            block.drop.p = rate
        seen.append(model(batch()[0]))
    return seen


@program
def hooks_of_the_program(wrap: Wrap) -> Any:
    model = wrap(Net())
    seen: list[torch.Tensor] = []
    model.register_forward_hook(lambda _, __, out: out * 2)
    model.blocks[1].register_forward_hook(lambda _, __, out: seen.append(out.detach().clone()))
    model.head.weight.register_hook(lambda grad: grad * 3)
    for at in range(4):
        if at == 2:
            model.blocks[2].up.register_forward_hook(lambda _, __, out: seen.append(out.detach().clone()))
        model(batch()[0]).square().sum().backward()
    return seen, [p.grad for p in model.parameters()]


@program
def other_precision(wrap: Wrap) -> Any:
    model = wrap(Net())
    seen = [model(batch()[0]) for _ in range(3)]
    model.double()
    seen += [model(batch()[0].double()) for _ in range(3)]
    model.float()
    return [*seen, model(batch()[0])]


@program
def checkpoints(wrap: Wrap) -> Any:
    model = wrap(Net())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    [step(model, optimizer) for _ in range(3)]
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    size = len(file.getvalue())
    [step(model, optimizer) for _ in range(2)]
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loaded = Net()
    loaded.load_state_dict(saved["model"])
    return step(model, optimizer), weights(model), weights(loaded), size


@program
def copies_and_pickles(wrap: Wrap) -> Any:
    model = wrap(Net())
    for _ in range(3):
        model(batch()[0])
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model) is Net
    return weights(again), copy.deepcopy(model)(batch()[0])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "every_optimizer" else ()) for name in PROGRAMS]
)
def test_a_program_gives_what_it_gives_on_one_device(name: str, pool: WorkerPool) -> None:
    check(PROGRAMS[name], pool, 1e-2 if name == "mixed_precision" else 1e-5)
