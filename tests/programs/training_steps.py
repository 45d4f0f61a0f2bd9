"""Common training steps. Each takes a model, an optimizer and the step number, and returns the observed values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from tests.models import (
    CLASSES,
    LENGTH,
    WORDS,
    Checkpointed,
    Counted,
    Normed,
    Plain,
    Skipping,
    Text,
    TimeFirst,
    TwoHeads,
)

Seen = list[Any]
Step = Callable[[nn.Module, torch.optim.Optimizer, int], Seen]


class Program(NamedTuple):
    make: Callable[[], nn.Module]
    step: Step
    path: str = "overlapped"


PROGRAMS: dict[str, Program] = {}


def program(make: Callable[[], nn.Module], path: str = "overlapped") -> Callable[[Step], Step]:
    def add(step: Step) -> Step:
        PROGRAMS[step.__name__] = Program(make, step, path)
        return step

    return add


def batch(step: int, samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 9, generator=chance, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (samples,), generator=chance)


def text(step: int, samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (samples, LENGTH), generator=chance)
    labels = ids.clone()
    labels[torch.rand(labels.shape, generator=chance) < 0.3] = -100
    return ids, labels


def finish(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> Seen:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return [loss.item()]


@program(Plain)
def cross_entropy(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    return finish(F.cross_entropy(model(x), y), optimizer)


@program(lambda: Plain(0.3))
def dropout(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    return [*finish(F.cross_entropy(model(x), y), optimizer), torch.rand(2)]


@program(Plain, "")
def dropout_turned_on_later(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    model.layers[1].drop.p = 0.3 if step > 2 else 0.0
    return [*finish(F.cross_entropy(model(x), y), optimizer), torch.rand(2)]


@program(Plain, "")
def dropout_turned_off_and_on(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    model.layers[1].drop.p = 0.3 if step < 3 else 0.0 if step < 6 else 0.2
    return [*finish(F.cross_entropy(model(x), y), optimizer), torch.rand(2)]


@program(Plain)
def read_early(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    seen = [loss.item(), bool(torch.isnan(loss))]
    return [*seen, *finish(loss / 2, optimizer)]


@program(Plain)
def metrics(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    seen = finish(loss, optimizer)
    return [*seen, (logits.argmax(1) == y).float().mean().item(), logits.detach().clone(), float(loss.exp())]


@program(Text)
def loss_inside(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    ids, labels = text(step)
    return finish(model(ids, labels=labels)["loss"], optimizer)


@program(lambda: Text(0.2))
def loss_inside_with_dropout(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    ids, labels = text(step)
    return finish(model(labels=labels, ids=ids)["loss"], optimizer)


@program(Text)
def uneven_batches(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    seen = []
    for samples in (8, 7, 3):
        ids, labels = text(step, samples)
        seen += finish(model(ids, labels)["loss"], optimizer)
    return seen


@program(Text)
def six_lengths(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    seen = []
    for length in range(4, 10):
        chance = torch.Generator().manual_seed(10 * step + length)
        ids = torch.randint(0, WORDS, (8, length), generator=chance)
        seen += finish(model(ids, labels=ids)["loss"], optimizer)
    return seen


@program(Plain)
def accumulation(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    optimizer.zero_grad()
    seen = []
    for part in range(3):
        x, y = batch(10 * step + part)
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        seen.append(loss.item())
    seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
    optimizer.step()
    return seen


@program(TwoHeads)
def two_losses(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    first, second = model(x)
    loss = F.mse_loss(first, x[:, :3]) + 0.3 * F.cross_entropy(second, y, reduction="sum") / len(y)
    return finish(loss, optimizer)


@program(Plain)
def decay_in_the_loss(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    loss = F.cross_entropy(model(x), y)
    loss = loss + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
    return finish(loss, optimizer)


@program(Plain)
def class_weights_and_masks(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    weight = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
    mask = (y != 2).double()
    logits = model(x)
    each = F.cross_entropy(logits, y, reduction="none")
    loss = F.cross_entropy(logits, y, weight=weight) + (each * mask).sum() / mask.sum()
    return finish(loss, optimizer)


@program(TimeFirst)
def samples_second(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    chance = torch.Generator().manual_seed(step)
    x = torch.randn(LENGTH, 8, 9, generator=chance, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (LENGTH, 8), generator=chance)
    return finish(F.cross_entropy(model(x).flatten(0, 1), y.flatten()), optimizer)


@program(TimeFirst)
def ctc(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    chance = torch.Generator().manual_seed(step)
    x = torch.randn(LENGTH, 8, 9, generator=chance, dtype=torch.float64)
    targets = torch.randint(1, CLASSES, (8, 3), generator=chance)
    lengths = torch.randint(1, 3, (8,), generator=chance)
    scores = model(x).log_softmax(2)
    return finish(F.ctc_loss(scores, targets, torch.full((8,), LENGTH), lengths, zero_infinity=True), optimizer)


@program(Plain)
def changed_after_the_call(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    scale = torch.ones(8, CLASSES, dtype=torch.float64)
    logits = model(x.clone())
    loss = F.cross_entropy(logits, y.clone()) + (logits.detach() * scale).sum()
    x.zero_()
    scale.numpy()[:] = 7
    return finish(loss, optimizer)


@program(Plain)
def gradient_of_the_input(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    x.requires_grad_()
    seen = finish(F.cross_entropy(model(x * 2), y), optimizer)
    return [*seen, x.grad]


@program(Plain, "")
def hooks_and_frozen(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    seen: Seen = []
    model.enter.weight.requires_grad_(step % 2 == 0)
    handle = model.leave.weight.register_hook(lambda gradient: seen.append(gradient.norm().item()) or gradient * 0.5)
    seen += finish(F.cross_entropy(model(x), y), optimizer)
    handle.remove()
    return seen


@program(Plain)
def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return [loss.item(), scaler.get_scale()]


@program(Plain)
def evaluated_between(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    seen = finish(F.cross_entropy(model(x), y), optimizer)
    model.eval()
    with torch.no_grad():
        seen.append(model(x).clone())
    model.train()
    return seen


@program(lambda: Plain(0.3), "")
def own_teacher(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    logits = model(x)
    with torch.no_grad():
        taught = model(x + 0.1)
    loss = F.cross_entropy(logits, y) + F.mse_loss(logits, taught)
    return [*finish(loss, optimizer), taught.clone(), torch.rand(2)]


@program(Counted)
def buffers_written_once_a_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step, 7)
    if step == 3:
        model(x)  # counts, though nobody looks at what it returns
    loss = F.cross_entropy(model(x), y)
    before = model.state_dict()["steps"].clone() if step % 2 else model.steps.item()
    return [before, *finish(loss, optimizer), model.steps.item()]


@program(Checkpointed)
def checkpoints(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step, 7)
    return [*finish(F.cross_entropy(model(x), y), optimizer), torch.rand(2)]


@program(lambda: Checkpointed(reentrant=True))
def reentrant_checkpoints(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    return checkpoints(model, optimizer, step)


@program(Skipping)
def layers_left_out(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    seen: Seen = []
    for part in range(4):
        x, y = batch(10 * step + part)
        logits, *inner = model(x)
        loss = F.cross_entropy(logits, y) + sum(one.square().mean() for one in inner)
        seen += [len(inner), *finish(loss, optimizer), torch.rand(1)]
    return seen


@program(TimeFirst)
def one_sample_next_to_two(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    chance = torch.Generator().manual_seed(step)
    x = torch.randn(LENGTH, 5, 9, generator=chance, dtype=torch.float64)
    return finish(model(x).square().mean(), optimizer)


# ── what must not be split ─────────────────────────────────────────────────────────────────────────────────────────
@program(Plain)
def contrastive(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, _ = batch(step)
    found = F.normalize(model(x), dim=1)
    return finish(F.cross_entropy(found @ found.T / 0.1, torch.arange(len(x))), optimizer)


@program(Normed, "undivided")
def batch_norm(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    return finish(F.cross_entropy(model(x), y), optimizer)


@program(Plain, "")
def gradient_penalty(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    x.requires_grad_()
    loss = F.cross_entropy(model(x), y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return finish(loss + gradient.pow(2).sum(), optimizer)


@program(Plain, "")
def twice(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    return [loss.item()]


@program(Plain, "")
def two_calls(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    loss = F.cross_entropy(model(x), y) + 0.1 * F.mse_loss(model(x + 0.1), model(x - 0.1).detach())
    return finish(loss, optimizer)


@program(Plain)
def predictions_by_data(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    logits = model(x)
    _, predicted = torch.max(logits.data, 1)
    loss = F.cross_entropy(logits, y)
    seen = finish(loss, optimizer)
    return [*seen, predicted.clone(), (predicted == y.data).sum(), loss.data, logits.data.requires_grad]


@program(Plain)
def loss_by_data(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    loss = F.cross_entropy(model(x), y)
    total = torch.zeros(()) + loss.data * 2
    return [loss.data.item(), *finish(loss, optimizer), total]


@program(Plain, "")
def written_by_data(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    logits = model(x)
    logits.data.clamp_(-0.1, 0.1)
    return [*finish(F.cross_entropy(logits, y), optimizer), logits.clone().detach()]
