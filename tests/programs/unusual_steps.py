"""Unusual training steps: reads, writes, gradients and exceptions at uncommon places.

Each takes a managed model, an optimizer and the number of the step, as in `programs`, and returns what it has seen.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.models import CLASSES, LENGTH, WORDS, Plain, Text, TwoHeads
from tests.programs.training_steps import Program, Seen, Step, batch, finish, text

ODD: dict[str, Program] = {}
_DROPS = 0.2


def odd(make: Callable[[], nn.Module], path: str = "") -> Callable[[Step], Step]:
    def add(step: Step) -> Step:
        ODD[step.__name__] = Program(make, step, path)
        return step

    return add


def dropping() -> nn.Module:
    return Plain(_DROPS)


def gradients(model: nn.Module) -> Seen:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@odd(TwoHeads)
def two_losses_backward_separately(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    optimizer.zero_grad()
    first, second = model(x)
    one, two = F.mse_loss(first, x[:, :3]), F.cross_entropy(second, y)
    one.backward(retain_graph=True)
    seen = gradients(model)
    two.backward()
    optimizer.step()
    return [*seen, one.item(), two.item()]


@odd(TwoHeads)
def only_the_early_head(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, _ = batch(step)
    optimizer.zero_grad(set_to_none=True)
    first, _ = model(x)
    F.mse_loss(first, x[:, :3]).backward()
    seen = gradients(model)
    optimizer.step()
    return seen


@odd(Plain)
def penalty_on_the_input(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    x.requires_grad_()
    logits = model(x)
    (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
    return finish(F.cross_entropy(logits, y) + 0.1 * (slope.norm(2, dim=1) - 1).pow(2).mean(), optimizer)


@odd(dropping)
def penalty_on_the_input_with_dropout(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    return [*penalty_on_the_input(model, optimizer, step), torch.rand(1)]


@odd(Plain)
def detached_teacher(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    logits = model(x)
    soft = logits.detach().softmax(-1)
    straight = (logits.argmax(-1, keepdim=True) == torch.arange(CLASSES)).double()
    through = straight + logits - logits.detach()
    loss = F.cross_entropy(logits, y) - (soft * logits.log_softmax(-1)).sum(-1).mean() + through.pow(2).mean()
    return finish(loss, optimizer)


@odd(Plain, "overlapped")
def targets_changed_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    soft, mask = F.one_hot(y, CLASSES).double(), torch.ones(8, dtype=torch.float64)
    logits = model(x.clone())
    loss = -(logits.log_softmax(-1) * soft.clone()).sum(-1).mul(mask.clone()).mean()
    soft.roll(1, 0)
    soft.fill_(0.1)
    mask[3:] = 0
    loss = loss + (logits.square().mean(-1) * mask.clone()).mean() + (logits.detach() * soft).sum()
    soft.zero_()
    mask.numpy()[:] = 9
    x.mul_(3)
    return finish(loss, optimizer)


@odd(dropping)
def average_of_weights(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    average = copy.deepcopy(model)
    seen = finish(F.cross_entropy(model(x), y), optimizer)
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.3)
    average.eval()
    with torch.no_grad():
        seen.append(average(x).clone())
    return seen


@odd(Plain)
def averaged_model(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    average = torch.optim.swa_utils.AveragedModel(model)
    seen = finish(F.cross_entropy(model(x), y), optimizer)
    average.update_parameters(model)
    return [*seen, average(x).detach().clone()]


@odd(Plain)
def scaler_with_an_overflow(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    seen: Seen = []
    for factor in (1.0, math.inf, 0.5):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y) * factor).backward()
        scaler.unscale_(optimizer)
        seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


@odd(Plain)
def autocast_around_the_call(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
        loss = F.cross_entropy(logits.float(), y)
    loss.backward()
    size = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    optimizer.zero_grad()
    return [logits.dtype is torch.bfloat16, round(loss.item(), 1), round(size.item(), 1)]


@odd(Plain)
def loss_in_numpy(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    value = loss.detach().cpu().numpy()
    hits = np.mean(logits.detach().numpy().argmax(1) == y.numpy())
    return [float(value), float(hits), float(f"{loss:.6f}"), *finish(loss, optimizer)]


@odd(Plain, "overlapped")
def outputs_before_and_after(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    before = logits[0].tolist()
    seen = finish(loss, optimizer)
    return [*before, *seen, *logits[0].tolist(), logits.sum().item(), len(logits), logits.shape[1]]


@odd(dropping)
def called_twice_before_backward(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    one, two = model(x), model(x.flip(0))
    loss = F.cross_entropy(one, y) + F.kl_div(two.flip(0).log_softmax(-1), one.softmax(-1), reduction="batchmean")
    return [*finish(loss, optimizer), torch.rand(1)]


@odd(dropping)
def two_calls_two_backwards(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    optimizer.zero_grad()
    first, second = F.cross_entropy(model(x), y), F.cross_entropy(model(-x), y)
    second.backward()
    first.backward()
    optimizer.step()
    return [first.item(), second.item(), torch.rand(1)]


@odd(Text)
def uneven_and_tiny_batches(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    seen = []
    for samples in (8, 5, 2, 1, 8):
        ids, labels = text(10 * step + samples, samples)
        labels[:, 1] = ids[:, 1]
        seen += finish(model(ids, labels)["loss"], optimizer)
    return seen


@odd(lambda: Text(_DROPS))
def another_length_each_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    chance = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (8, LENGTH + step), generator=chance)
    return [*finish(model(ids, labels=ids)["loss"], optimizer), torch.rand(1)]


@odd(dropping)
def evaluation_between_call_and_backward(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    loss = F.cross_entropy(model(x), y)
    model.eval()
    with torch.no_grad():
        quiet = model(x).clone()
    model.train()
    return [quiet, *finish(loss, optimizer), torch.rand(1)]


@odd(dropping)
def loss_raises_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    seen: Seen = []
    with suppress(RuntimeError, IndexError, ValueError):
        wrong = F.cross_entropy(model(x), y[:3])
        wrong.backward()
        seen.append(-1.0)
    with suppress(IndexError, RuntimeError):
        wrong = F.cross_entropy(model(x), y + CLASSES)
        wrong.backward()
        seen.append(-2.0)
    return [*seen, *finish(F.cross_entropy(model(x), y), optimizer), torch.rand(1)]


@odd(dropping)
def seeds_inside_the_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    torch.manual_seed(step)
    loss = F.cross_entropy(model(x), y)
    torch.manual_seed(100 + step)
    noise = torch.randn(3)
    return [noise, *finish(loss, optimizer), torch.rand(1)]


@odd(dropping)
def draws_between_call_and_loss(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    logits = model(x)
    logits = logits + 0.1 * torch.randn_like(logits)
    loss = F.cross_entropy(F.dropout(logits, 0.3), y)
    return [*finish(loss, optimizer), torch.rand(1)]


@odd(Plain, "overlapped")
def zeroed_between_forward_and_backward(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    loss = F.cross_entropy(model(x), y)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    seen = gradients(model)
    optimizer.step()
    return seen


@odd(Plain)
def gradients_by_name(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    found = torch.autograd.grad(loss, [model.enter.weight, model.leave.bias], retain_graph=True)
    loss.backward(inputs=[model.leave.weight])
    for parameter, gradient in zip((model.enter.weight, model.leave.bias), found, strict=True):
        parameter.grad = gradient
    seen = gradients(model)
    optimizer.step()
    return seen


@odd(Plain)
def gradient_of_the_logits(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    logits = model(x)
    logits.retain_grad()
    seen = finish(F.cross_entropy(logits, y), optimizer)
    return [*seen, logits.grad]


@odd(Plain)
def gradient_given_for_the_logits(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    optimizer.zero_grad()
    logits = model(x)
    logits.backward((logits.detach().softmax(-1) - F.one_hot(y, CLASSES)) / len(y))
    seen = gradients(model)
    optimizer.step()
    return seen


@odd(Plain)
def hook_on_the_logits(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    seen: Seen = []
    logits = model(x)
    logits.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 0.5)
    return [*finish(F.cross_entropy(logits, y), optimizer), *seen]


@odd(Plain)
def best_of_the_batch(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    each = F.cross_entropy(model(x), y, reduction="none")
    hard = each.topk(3).values
    return finish(hard.mean() if each.max() > 0.1 else each.mean(), optimizer)


@odd(Plain)
def losses_in_a_list(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    logits = model(x)
    each = [F.cross_entropy(logits[at : at + 1], y[at : at + 1]) for at in range(len(x))]
    return finish(torch.stack(each).mean(), optimizer)


@odd(Plain)
def second_step_by_lbfgs(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> torch.Tensor:
        inner.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return [float(inner.step(closure)), *finish(F.cross_entropy(model(x), y), optimizer)]


@odd(Plain)
def weights_written_between(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        model.leave.weight.mul_(0.9)
        model.enter.bias.data += 0.01
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return [loss.item()]


@odd(Plain)
def adversarial_example(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    x.requires_grad_()
    F.cross_entropy(model(x), y).backward()
    nearby = (x + 0.1 * x.grad.sign()).detach()
    return [x.grad.clone(), *finish(F.cross_entropy(model(nearby), y), optimizer)]


@odd(dropping)
def outputs_dropped(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    model(x)
    loss = F.cross_entropy(model(x), y)
    model(x)
    return [*finish(loss, optimizer), torch.rand(1)]


@odd(dropping)
def kept_over_steps(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    kept: list[Any] = []
    seen: Seen = []
    for part in range(3):
        logits = model(x + part)
        kept.append(logits)
        seen += finish(F.cross_entropy(logits, y), optimizer)
    return [*seen, *[one.detach().clone() for one in kept]]


@odd(Plain)
def written_outputs(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    logits = model(x)
    logits *= 2
    logits[:, 0] = -1.0
    logits.clamp_(max=4)
    return [*finish(F.cross_entropy(logits, y), optimizer), logits.detach().clone()]


@odd(Plain)
def negative_and_empty_indices(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    logits = model(x)
    picked = logits[torch.arange(len(y)), y]
    return finish(-(picked - logits.logsumexp(-1)).mean() + logits[-1].sum() * 0 + logits[y == 99].sum(), optimizer)


@odd(Plain)
def frozen_for_a_call(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    model.requires_grad_(False)
    x.requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    model.requires_grad_(True)
    return [slope, *finish(F.cross_entropy(model(x.detach()), y), optimizer)]


@odd(Plain)
def rescaled_by_another_model(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    torch.manual_seed(step)
    critic = nn.Linear(CLASSES, 1).double()
    logits = model(x)
    loss = F.cross_entropy(logits, y) - critic(logits).mean()
    seen = finish(loss, optimizer)
    return [*seen, critic.weight.grad, critic.bias.grad]


@odd(Plain)
def features_into_the_next_call(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    first = model(x)
    second = model(torch.cat([first, x[:, CLASSES:]], 1))
    return finish(F.cross_entropy(second, y), optimizer)


@odd(Plain)
def state_saved_before_backward(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    loss = F.cross_entropy(model(x), y)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    seen = finish(loss, optimizer)
    model.load_state_dict(before)
    return [*seen, *finish(F.cross_entropy(model(x), y), optimizer)]
