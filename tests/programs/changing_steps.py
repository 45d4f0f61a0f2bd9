"""Unusual training steps, continued: models that change while training, escaping values, several models and threads."""

from __future__ import annotations

import copy
import io
import math
import threading
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.models import CLASSES, WIDTH, Plain, TwoHeads
from tests.programs.training_steps import Seen, batch, finish
from tests.programs.unusual_steps import ODD, dropping, gradients, odd

_kept: list[Any] = []


@odd(Plain)
def old_gradients_are_kept(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    if step == 0:
        _kept.clear()
    optimizer.zero_grad(set_to_none=True)
    F.cross_entropy(model(x), y).backward()
    _kept.append([p.grad for p in model.parameters()])
    optimizer.step()
    return [one.clone() for kept in _kept for one in kept]


@odd(TwoHeads)
def backward_from_two_roots(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    optimizer.zero_grad()
    first, second = model(x)
    losses = [F.mse_loss(first, x[:, :3]), F.cross_entropy(second, y)]
    torch.autograd.backward(losses, [torch.tensor(0.5).double(), torch.tensor(2.0).double()])
    seen = gradients(model)
    optimizer.step()
    return [*seen, *[float(one.detach()) for one in losses]]


@odd(dropping)
def looked_at_in_many_ways(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    logits = model(x)
    loss = 0 + F.cross_entropy(logits, y)
    file = io.BytesIO()
    torch.save(logits.detach(), file)
    file.seek(0)
    seen = [
        loss.requires_grad, loss.is_leaf, loss.grad_fn is not None, math.isnan(loss), float(np.asarray(loss.detach())),
        {loss: 1}[loss], loss in [loss], bool(loss > 0), loss.dim(), logits.size(), torch.load(file),
        copy.deepcopy(logits.detach()), float(max([loss.detach(), loss.detach() * 2])), logits.detach().tolist()[0],
    ]  # fmt: skip
    return [*seen, *finish(loss, optimizer), torch.rand(1)]


@odd(Plain)
def no_samples(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    empty = F.cross_entropy(model(x[:0]), y[:0], reduction="sum")
    return [empty.item(), *finish(F.cross_entropy(model(x), y) + empty, optimizer)]


@odd(dropping)
def in_another_thread(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    seen: Seen = []
    thread = threading.Thread(target=lambda: seen.extend(finish(F.cross_entropy(model(x), y), optimizer)))
    thread.start()
    thread.join()
    return [*seen, torch.rand(1)]


@odd(dropping)
def forward_here_backward_there(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    seen = gradients(model)
    optimizer.step()
    return [*seen, loss.item(), torch.rand(1)]


@odd(dropping)
def adversaries(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    """A generator whose samples the model judges, trained in turns."""
    torch.manual_seed(step)
    x, y = batch(step)
    maker = nn.Sequential(nn.Linear(4, 9), nn.Tanh()).double()
    own = torch.optim.SGD(maker.parameters(), 0.1)
    noise = torch.randn(8, 4, dtype=torch.float64)
    optimizer.zero_grad()
    real, fake = model(x), model(maker(noise).detach())
    judged = F.cross_entropy(real, y) + F.softplus(fake[:, 0]).mean()
    judged.backward()
    optimizer.step()
    own.zero_grad()
    fooled = F.softplus(-model(maker(noise))[:, 0]).mean()
    fooled.backward()
    own.step()
    return [judged.item(), fooled.item(), *[p.detach().clone() for p in maker.parameters()], torch.rand(1)]


@odd(Plain)
def anomaly_and_inference(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    with torch.inference_mode():
        before = model(x).sum().item()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        loss = F.cross_entropy(model(x), y)
        return [before, *finish(loss, optimizer)]


@odd(Plain)
def another_head_in_mid_run(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    old = model.leave
    if step % 2:
        torch.manual_seed(7)
        model.leave = nn.Linear(WIDTH, CLASSES).double()
    try:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return [loss.item(), model.leave.weight.grad.clone()]
    finally:
        model.leave = old
        optimizer.zero_grad()


@odd(Plain)
def by_functional_call(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    weights = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    other = torch.func.functional_call(model, weights, (x,))
    slopes = torch.func.grad(lambda w: F.cross_entropy(torch.func.functional_call(model, w, (x,)), y))(weights)
    return [other, *slopes.values(), *finish(F.cross_entropy(model(x), y), optimizer)]


@odd(dropping)
def discarded_before_backward(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    loss = F.cross_entropy(model(x), y)
    if step % 2:
        del loss
        return [torch.rand(1)]
    return [*finish(loss, optimizer), torch.rand(1)]


@odd(dropping)
def only_looked_at(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    watched = F.cross_entropy(model(x), y).item()
    with torch.no_grad():
        quiet = F.cross_entropy(model(x), y).item()
    return [watched, quiet, *finish(F.cross_entropy(model(x), y), optimizer), torch.rand(1)]


@odd(Plain)
def steps_of_other_sizes(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    seen: Seen = []
    for samples in (8, 6, 4, 3):
        x, y = batch(step + samples, samples)
        seen += finish(F.cross_entropy(model(x), y, label_smoothing=0.1), optimizer)
    return seen


@odd(Plain)
def parameters_in_the_loss(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    logits = model(x)
    tied = logits @ model.leave.weight @ model.enter.weight
    loss = F.cross_entropy(logits, y) + F.mse_loss(tied, x) + 1e-3 * model.enter.weight.abs().sum() * logits.mean()
    return finish(loss, optimizer)


@odd(dropping)
def called_inside_a_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    x.requires_grad_()
    logits = checkpoint(model, x, use_reentrant=step % 2 == 0)
    return [*finish(F.cross_entropy(logits, y), optimizer), torch.rand(1)]


@odd(Plain)
def inner_loop_with_adapted_weights(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    inner = F.cross_entropy(model(x), y)
    names, own = zip(*model.named_parameters(), strict=True)
    slopes = torch.autograd.grad(inner, own, create_graph=True)
    adapted = {name: p - 0.1 * slope for name, p, slope in zip(names, own, slopes, strict=True)}
    outer = F.cross_entropy(torch.func.functional_call(model, adapted, (x.flip(0),)), y)
    theirs = {name: nn.Parameter(p.detach() * 0.9) for name, p in model.named_parameters()}
    other = torch.func.functional_call(model, theirs, (x,))
    F.cross_entropy(other, y).backward()
    return [*finish(outer, optimizer), *[p.grad for p in theirs.values()]]


@odd(Plain)
def weights_assigned(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    if step == 2:
        state = {key: value.clone() * 0.9 for key, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    return [loss.item()]


@odd(Plain)
def saved_tensors_elsewhere(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Seen:
    x, y = batch(step)
    with torch.autograd.graph.save_on_cpu():
        loss = F.cross_entropy(model(x), y)
    return finish(loss, optimizer)


ODDER = ODD
