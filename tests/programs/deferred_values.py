"""Programs that use model outputs between one deferred call and the next."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests import models
from tests.runtime.deferred.rig import Program, Session

# Recorded ops run later than in plain torch. Where a tensor gets gradients from several ops, these are then summed in
# another order, which shows in the last bit.
REORDERED = (
    "calls_that_use_each_other_and_a_second_root",
    "weight_decay_twice_differentiated",
    "losses_of_calls_that_carry_a_state",
)
PROGRAMS: dict[str, tuple[Program, Any]] = {}


def program(make: Any = models.plain) -> Any:
    def add(function: Program) -> Program:
        PROGRAMS[function.__name__] = function, make
        return function

    return add


def step(s: Session, loss: torch.Tensor) -> None:
    loss.backward()
    s.saw(loss.detach())
    s.update()


# ── usual losses ───────────────────────────────────────────────────────────────────────────────────────────────────
@program()
def cross_entropy(s: Session) -> None:
    step(s, F.cross_entropy(s.model(s.x), s.y))


@program()
def cross_entropy_module(s: Session) -> None:
    step(s, nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 0.5]).double())(s.model(s.x), s.y))


@program()
def ignored_targets(s: Session) -> None:
    y = s.y.clone()
    y[::2] = -100
    step(s, F.cross_entropy(s.model(s.x), y, ignore_index=-100, reduction="sum") / (y != -100).sum())


@program()
def soft_targets(s: Session) -> None:
    step(s, F.cross_entropy(s.model(s.x), s.t.softmax(1)))


@program()
def mse(s: Session) -> None:
    step(s, ((s.model(s.x) - s.t) ** 2).mean())


@program()
def autoencoder(s: Session) -> None:
    out = s.model(s.x)
    step(s, F.mse_loss(out, s.x[:, :3]) + (out - s.x[:, 1:]).abs().mean())


@program()
def nll_by_hand(s: Session) -> None:
    logits = s.model(s.x)
    logp = logits - torch.logsumexp(logits, 1, keepdim=True)
    step(s, -logp[torch.arange(len(logits)), s.y].mean())


@program()
def gathered(s: Session) -> None:
    step(s, -s.model(s.x).log_softmax(-1).gather(1, s.y[:, None]).squeeze(1).mean())


@program()
def binary(s: Session) -> None:
    out = s.model(s.x)[:, 0]
    step(s, F.binary_cross_entropy_with_logits(out, (s.y > 0).type_as(out).view_as(out)))


@program()
def masked_mean(s: Session) -> None:
    mask = (s.y != 1).double()
    each = F.cross_entropy(s.model(s.x), s.y, reduction="none")
    step(s, (each * mask).sum() / mask.sum().clamp(min=1))


@program()
def one_hot_scatter(s: Session) -> None:
    logits = s.model(s.x)
    target = torch.zeros_like(logits)
    target.scatter_(1, s.y.unsqueeze(1), 1.0)
    step(s, -(target * logits.log_softmax(1)).sum(1).mean())


@program()
def focal(s: Session) -> None:
    ce = F.cross_entropy(s.model(s.x), s.y, reduction="none")
    step(s, (((1 - torch.exp(-ce)) ** 2) * ce).mean())


@program()
def contrastive(s: Session) -> None:
    z = F.normalize(s.model(s.x), dim=1)
    sim = z @ z.t() / 0.1
    sim.fill_diagonal_(-1e9)
    step(s, F.cross_entropy(sim, torch.arange(len(z)).roll(1)))


@program()
def two_views(s: Session) -> None:
    a, b = F.normalize(s.model(s.x), dim=1), F.normalize(s.model(s.x2), dim=1)
    step(s, F.cross_entropy(a @ b.t(), torch.arange(len(a))))


@program()
def sum_of_two_calls(s: Session) -> None:
    step(s, F.cross_entropy(s.model(s.x), s.y) + 0.5 * F.mse_loss(s.model(s.x2), s.t))


@program()
def three_calls_in_a_list(s: Session) -> None:
    losses = [F.cross_entropy(s.model(x), s.y) for x in (s.x, s.x2, s.x + 1)]
    step(s, torch.stack(losses).mean())


@program()
def sum_builtin(s: Session) -> None:
    step(s, sum(F.cross_entropy(s.model(x), s.y) for x in (s.x, s.x2)))


# ── parameters and real tensors in the loss ────────────────────────────────────────────────────────────────────────
@program()
def weight_decay(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y)
    step(s, loss + 1e-2 * sum(p.pow(2).sum() for p in s.net.parameters()))


@program()
def head_outside(s: Session) -> None:
    step(s, F.cross_entropy(s.head(s.model(s.x).relu()), s.y % 2))


@program()
def tied_head(s: Session) -> None:
    hidden = s.model(s.x)
    step(s, F.mse_loss(hidden @ s.net[2].weight, s.x.sum(1, keepdim=True)))


@program()
def distillation(s: Session) -> None:
    teacher = s.t * 2
    out = s.model(s.x)
    kl = F.kl_div((out / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean") * 4
    step(s, 0.3 * kl + 0.7 * F.cross_entropy(out, s.y))


@program()
def real_graph_in_loss(s: Session) -> None:
    scale = s.head.weight.sum().tanh()  # a graph that is there already
    step(s, (s.model(s.x) * scale).pow(2).mean())


@program()
def regularised_outputs(s: Session) -> None:
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    loss += 0.1 * out.pow(2).mean()
    loss = loss + 0.01 * out.abs().mean()
    step(s, loss)


@program()
def no_grad_weights(s: Session) -> None:
    out = s.model(s.x)
    with torch.no_grad():
        weight = out.softmax(1).max(1).values
    step(s, (weight * F.cross_entropy(out, s.y, reduction="none")).mean())


@program()
def detached_target(s: Session) -> None:
    out = s.model(s.x)
    step(s, F.mse_loss(out, out.detach().roll(1, 0)))


# ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────────
@program()
def early_item(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y)
    s.saw(loss.item())
    (loss / 4).backward()
    s.update()


@program()
def accuracy_before_backward(s: Session) -> None:
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    s.saw((out.argmax(1) == s.y).float().mean().item())
    step(s, loss)


@program()
def accuracy_after_backward(s: Session) -> None:
    out = s.model(s.x)
    correct = (out.argmax(1) == s.y).sum()
    step(s, F.cross_entropy(out, s.y))
    s.saw(correct.item(), out.argmax(1), out.softmax(1).detach())


@program()
def metric_under_no_grad(s: Session) -> None:
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    with torch.no_grad():
        top = out.topk(2, 1)
        hits = (top.indices == s.y[:, None]).any(1).double().mean()
    loss.backward()
    s.saw(hits, top.values, hits.requires_grad, top.values.requires_grad)
    s.update()


@program()
def logits_first(s: Session) -> None:
    out = s.model(s.x)
    s.saw(out.mean().item(), repr(out), f"{out.sum():.4f}")
    step(s, F.cross_entropy(out, s.y))


@program()
def nan_check(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y)
    if not torch.isfinite(loss):
        s.saw("not finite")
    if loss > 1e6 or torch.isnan(loss).any():
        s.saw("too large")
    step(s, loss)


@program()
def running_total(s: Session) -> None:
    total = torch.zeros((), dtype=torch.float64)
    for x in (s.x, s.x2):
        loss = F.cross_entropy(s.model(x), s.y)
        total = total + loss.detach()
        total += loss.detach()
        loss.backward()
    s.saw(total)
    s.update()


@program()
def numpy_and_lists(s: Session) -> None:
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    s.saw(out.detach().numpy().sum(), loss.tolist(), float(loss), np.asarray(out.detach()).mean())
    step(s, loss)


@program()
def copies(s: Session) -> None:
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    kept = copy.deepcopy(out.detach())
    file = io.BytesIO()
    torch.save(out.detach(), file)
    file.seek(0)
    s.saw(kept, torch.load(file), pickle.loads(pickle.dumps(loss.detach())))
    step(s, loss)


@program()
def several_reads(s: Session) -> None:
    out = s.model(s.x)
    ce, reg = F.cross_entropy(out, s.y), out.pow(2).mean()
    s.saw(ce.item(), reg.item())
    step(s, ce + 0.1 * reg)


@program()
def parts_read_before_the_sum_is_differentiated(s: Session) -> None:
    out = s.model(s.x)
    ce, reg = F.cross_entropy(out, s.y), out.pow(2).mean()
    loss = ce + 0.1 * reg
    s.saw(ce.item(), reg.item(), loss.item())
    step(s, loss)


@program()
def something_of_the_loss_read(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y)
    perplexity = loss.exp()
    s.saw(perplexity.item())
    step(s, loss)


@program()
def other_root_than_read(s: Session) -> None:
    out = s.model(s.x)
    s.saw(out.pow(2).mean().item())
    step(s, F.cross_entropy(out, s.y))


@program()
def iterated(s: Session) -> None:
    out = s.model(s.x)
    rows = [row.sum() for row in out]
    first, *_ = out.unbind(1)
    a, b = out.split([1, 2], 1)
    values, indices = out.max(1)
    s.saw(len(out), out.shape[0], out.size(1), out.dim(), tuple(out.stride()))
    step(s, torch.stack(rows).mean() + first.sum() + (a * b).sum() + values.mean() + indices.double().mean())


# ── backward in other ways ─────────────────────────────────────────────────────────────────────────────────────────
@program()
def accumulation(s: Session) -> None:
    for x in (s.x, s.x2, s.x * 2):
        (F.cross_entropy(s.model(x), s.y) / 3).backward()
    s.update()


@program()
def retained_twice(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y)
    loss.backward(retain_graph=True)
    s.saw([p.grad for p in s.net.parameters()])
    loss.backward(retain_graph=True)
    loss.backward()
    s.update()


@program()
def backward_twice(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y)
    loss.backward()
    loss.backward()


@program()
def autograd_grad(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y)
    grads = torch.autograd.grad(loss, list(s.net.parameters()))
    s.saw(*grads)
    with torch.no_grad():
        for p, g in zip(s.net.parameters(), grads, strict=True):
            p -= 0.1 * g


@program()
def grad_of_logits(s: Session) -> None:
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    (g,) = torch.autograd.grad(loss, out, retain_graph=True)
    s.saw(g)
    step(s, loss)


@program()
def grad_of_logits_after_reading(s: Session) -> None:
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    s.saw(loss.item())
    (g,) = torch.autograd.grad(loss * 2, out, retain_graph=True)
    s.saw(g)
    step(s, loss)


@program()
def gradient_penalty(s: Session) -> None:
    x = s.x.clone().requires_grad_()
    out = s.model(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    step(s, F.cross_entropy(out, s.y) + (g.norm(2, 1) - 1).pow(2).mean())


@program()
def create_graph(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y)
    loss.backward(create_graph=True)
    norm = sum(p.grad.pow(2).sum() for p in s.net.parameters())
    norm.backward()
    s.saw(norm.detach())
    s.update()


@program()
def penalty_after_reading(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y)
    s.saw(loss.item())
    grads = torch.autograd.grad(loss, list(s.net.parameters()), create_graph=True)
    (loss + sum(g.pow(2).sum() for g in grads)).backward()
    s.update()


@program()
def input_gradient(s: Session) -> None:
    x = s.x.clone().requires_grad_()
    F.cross_entropy(s.model(x), s.y).backward()
    s.saw(x.grad)
    adversarial = x.detach() + 0.1 * x.grad.sign()
    step(s, F.cross_entropy(s.model(adversarial), s.y))


@program()
def input_with_history(s: Session) -> None:
    before = s.head(s.t[:, :3]) @ torch.ones(2, 4, dtype=torch.float64)
    step(s, F.cross_entropy(s.model(s.x + before), s.y))


@program()
def several_roots(s: Session) -> None:
    out = s.model(s.x)
    torch.autograd.backward([F.cross_entropy(out, s.y), out.pow(2).mean()])
    s.update()


@program()
def vector_root(s: Session) -> None:
    out = s.model(s.x)
    out.backward(torch.ones_like(out) * 0.5)
    s.update()


@program()
def weighted_root(s: Session) -> None:
    F.cross_entropy(s.model(s.x), s.y).backward(torch.tensor(0.25, dtype=torch.float64))
    s.update()


@program()
def root_of_one_element(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y).view(1)
    step(s, loss)


@program()
def only_some_inputs(s: Session) -> None:
    F.cross_entropy(s.model(s.x), s.y).backward(inputs=list(s.net.parameters())[:2])
    s.saw([p.grad for p in s.net.parameters()])
    s.update()


@program()
def scaler(s: Session) -> None:
    found = _scaler(s)
    loss = F.cross_entropy(s.model(s.x), s.y)
    s.saw(loss.item())
    found.scale(loss).backward()
    found.unscale_(s.optimizer)
    s.saw(torch.nn.utils.clip_grad_norm_(s.net.parameters(), 0.1))
    found.step(s.optimizer)
    found.update()
    s.optimizer.zero_grad()


def _scaler(s: Session) -> Any:
    if not hasattr(s, "scaler"):
        s.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return s.scaler


@program(models.single)
def autocast(s: Session) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = s.model(s.x.float())
        s.saw(str(out.dtype))
        loss = F.cross_entropy(out @ torch.eye(3), s.y)
    s.saw(str(loss.dtype))
    step(s, loss)


@program(models.single)
def loss_out_of_autocast(s: Session) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = s.model(s.x.float())
    step(s, F.cross_entropy(out.float(), s.y))


# ── hooks and custom functions ─────────────────────────────────────────────────────────────────────────────────────
class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, low: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.low = low
        return x.clamp(min=low)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * g * (x > ctx.low), None


@program()
def custom_function(s: Session) -> None:
    step(s, Clamped.apply(s.model(s.x), 0.1).pow(2).mean())


@program()
def hook_on_logits(s: Session) -> None:
    out = s.model(s.x)
    out.register_hook(lambda g: s.saw(g) or g * 2)
    step(s, F.cross_entropy(out, s.y))


@program()
def retained_grad(s: Session) -> None:
    out = s.model(s.x)
    out.retain_grad()
    loss = F.cross_entropy(out, s.y)
    loss.backward()
    s.saw(out.grad)
    s.update()


@program()
def retained_grad_after_reading(s: Session) -> None:
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    s.saw(loss.item(), out.sum().item())
    out.retain_grad()
    loss.backward()
    s.saw(out.grad)
    s.update()


@program()
def hook_on_loss(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y)
    loss.register_hook(lambda g: g * 3)
    step(s, loss)


@program()
def hooks_on_parameters(s: Session) -> None:
    handles = [p.register_hook(lambda g: g.clamp(-0.1, 0.1)) for p in s.net.parameters()]
    found: dict[int, Any] = {}  # torch says nothing about the order
    handles += [
        p.register_post_accumulate_grad_hook(lambda p, at=at: found.update({at: p.grad.clone()}))
        for at, p in enumerate(s.net.parameters())
    ]
    step(s, F.cross_entropy(s.model(s.x), s.y))
    s.saw(*(found[at] for at in sorted(found)))
    for one in handles:
        one.remove()


@program()
def hooks_on_parameters_after_reading(s: Session) -> None:
    found: list[float] = []
    handle = next(s.net.parameters()).register_hook(lambda g: found.append(g.sum().item()) or g * 0.5)
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    s.saw(loss.item())
    step(s, loss + 0.1 * out.pow(2).mean())
    s.saw(len(found), torch.tensor(found))
    handle.remove()


@program()
def grad_fn_is_there(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y)
    s.saw(loss.requires_grad, loss.is_leaf, loss.grad_fn is not None)
    step(s, loss)


# ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────────
@program()
def targets_changed_later(s: Session) -> None:
    y, x, t = s.y.clone(), s.x.clone(), s.t.clone()
    loss = F.cross_entropy(s.model(x), y) + F.mse_loss(s.model(x) + t, t * 2)
    if s.mode is not None:  # autograd keeps no copies of targets: here they must not have been changed
        y.zero_()
        x.numpy()[:] = 7
        t.data.fill_(3)
    step(s, loss)


@program()
def operand_changed_between_uses(s: Session) -> None:
    t = s.t.clone()
    out = s.model(s.x)
    a = F.mse_loss(out, t)
    if s.mode is None:
        t = t.clone()
    t.numpy()[0] = 5
    step(s, a + F.mse_loss(out, t))


@program()
def masked_in_place(s: Session) -> None:
    out = s.model(s.x) * 1
    out.masked_fill_(s.t > 1, -1e4)
    out[:, 0] = 0.5
    out[out > 2] = 2.0
    out.mul_(2).add_(1)
    step(s, F.cross_entropy(out, s.y))


@program()
def view_written_to(s: Session) -> None:
    out = s.model(s.x) * 1
    out[:, 1].zero_()
    part = out[:2]
    part *= 3
    step(s, F.cross_entropy(out, s.y))


@program()
def real_written_to(s: Session) -> None:
    bank = s.t.clone()
    out = s.model(s.x)
    loss = (out + bank).pow(2).mean()
    bank[:2] = out.detach()[:2]
    bank.add_(out.detach())
    s.saw(bank)
    step(s, loss)


@program()
def out_argument(s: Session) -> None:
    out = s.model(s.x)
    found = torch.empty(7, 3, dtype=torch.float64)
    torch.mul(out.detach(), 2, out=found)
    s.saw(found)
    step(s, F.cross_entropy(out, s.y))


@program()
def dropped(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y)
    del loss
    s.model(s.x2)
    step(s, F.cross_entropy(s.model(s.x), s.y))


@program()
def kept_over_a_step(s: Session) -> None:
    out = s.model(s.x)
    other = s.model(s.x2)
    step(s, F.cross_entropy(out, s.y))
    s.saw(out.detach(), other.detach())


@program()
def parameters_written_by_hand(s: Session) -> None:
    other = s.model(s.x2)
    F.cross_entropy(s.model(s.x), s.y).backward()
    with torch.no_grad():
        for p in s.net.parameters():
            p.data.add_(p.grad, alpha=-0.1)
            p.grad = None
    s.saw(other.detach())


@program()
def seen_by_frozen(s: Session) -> None:
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    first = next(s.net.parameters())
    first.requires_grad_(False)
    loss.backward()
    s.saw(first.grad)
    first.requires_grad_(True)
    s.update()


# ── mistakes ───────────────────────────────────────────────────────────────────────────────────────────────────────
@program()
def wrong_shape(s: Session) -> None:
    s.model(s.x) @ s.x


@program()
def wrong_target(s: Session) -> None:
    F.cross_entropy(s.model(s.x), s.y + 5).backward()


@program()
def no_scalar(s: Session) -> None:
    s.model(s.x).backward()


@program()
def nothing_to_differentiate(s: Session) -> None:
    s.model(s.x).detach().sum().backward()


@program()
def ambiguous_truth(s: Session) -> None:
    if s.model(s.x) > 0:
        s.saw("never")


@program()
def deep_copy_of_a_graph(s: Session) -> None:
    copy.deepcopy(s.model(s.x))


# ── outputs of other kinds ─────────────────────────────────────────────────────────────────────────────────────────
@program(models.pair)
def tuple_output(s: Session) -> None:
    a, b = s.model(s.x)
    step(s, F.cross_entropy(a, s.y) + F.cross_entropy(b, s.y % 2))


@program(models.pair)
def one_of_two_outputs(s: Session) -> None:
    a, _ = s.model(s.x)
    step(s, F.cross_entropy(a, s.y))


@program(models.nested)
def dictionary_output(s: Session) -> None:
    out = s.model(s.x)
    assert out["b"][1] is None
    s.saw(out["n"], list(out))
    step(s, F.cross_entropy(out["a"], s.y) + out["b"][0].mean() * out["n"])


@program(models.hugging)
def loss_inside(s: Session) -> None:
    out = s.model(s.x, labels=s.y)
    s.saw(type(out).__name__, list(out.keys()))
    loss = out.loss.mean()
    loss.backward()
    s.saw(out.loss.item(), out["logits"].argmax(-1), out[0].detach(), out.hidden[1].detach())
    s.update()


@program(models.hugging)
def own_loss_with_output(s: Session) -> None:
    out = s.model(s.x)
    s.saw(out.loss is None)
    step(s, F.cross_entropy(out.logits, s.y) + sum(h.pow(2).mean() for h in out.hidden))


@program()
def functorch_on_outputs(s: Session) -> None:
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    s.saw(torch.func.vmap(lambda row: row.sum())(out).detach(), torch.func.grad(lambda v: (v**2).sum())(out.detach()))
    step(s, loss)


@torch.jit.script
def scripted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((a - b) * (a - b)).mean()


@program()
def scripted_loss(s: Session) -> None:
    step(s, scripted(s.model(s.x), s.t))


@program()
def torch_ops(s: Session) -> None:
    step(s, torch.ops.aten.mse_loss(s.model(s.x), s.t))


@program()
def attributes_and_weak_references(s: Session) -> None:
    import weakref

    out = s.model(s.x)
    out.note = 3
    seen = {out: 1}
    ref = weakref.ref(out)
    loss = F.cross_entropy(out, s.y)
    loss.backward()
    s.saw(isinstance(out, torch.Tensor), torch.is_tensor(out), seen[out], out.note, ref() is out, bool(out.shape))
    s.update()


@program()
def own_draws(s: Session) -> None:
    out = s.model(s.x)
    step(s, F.mse_loss(out, torch.randn_like(s.t)) + F.dropout(out, 0.5).mean())
    s.saw(torch.rand(2))


@program()
def trained_flags_switched(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y)
    s.net.eval()
    step(s, loss)
    s.net.train()


@program()
def calls_that_use_each_other_and_a_second_root(s: Session) -> None:
    first = s.model(s.x)
    aux = first.pow(2).mean()
    s.saw(aux.item())
    second = s.model(torch.cat([first, first[:, :1]], 1))
    loss = F.cross_entropy(second + first, s.y) + 0.1 * sum(p.pow(2).sum() for p in s.net.parameters())
    s.saw(loss.item(), second.sum().item())
    (loss + aux + second.mean() + (second * s.net[0].weight.sum()).mean()).backward()
    s.update()


@program()
def weight_decay_twice_differentiated(s: Session) -> None:
    out = s.model(s.x)
    decay = sum(p.pow(2).sum() for p in s.net.parameters())
    loss = F.cross_entropy(out @ s.net[2].weight, s.y) + decay
    s.saw(loss.item())
    loss.backward(retain_graph=True)
    (loss + (out * s.net[0].weight.sum()).mean()).backward()
    s.update()


@program()
def weight_decay_penalty(s: Session) -> None:
    hidden = s.head(s.t)
    loss = F.mse_loss(s.model(s.x * hidden.mean()) @ s.net[2].weight, s.x.sum(1, keepdim=True)) * hidden.sum()
    s.saw(loss.item())
    grads = torch.autograd.grad(loss, list(s.net.parameters()), create_graph=True)
    (loss + sum(g.pow(2).sum() for g in grads)).backward()
    s.update()


# ── odd uses ───────────────────────────────────────────────────────────────────────────────────────────────────────
@program()
def constructors(s: Session) -> None:
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    s.saw(
        torch.tensor([float(loss), 1.0]), torch.as_tensor(loss.detach()), torch.tensor([loss.detach(), loss.detach()])
    )
    s.saw(
        torch.tensor(out.detach()),
        nn.Parameter(out.detach()),
        torch.asarray(out.detach()),
        torch.Tensor(out.detach().tolist()),
    )
    s.saw(
        torch.from_numpy(out.detach().numpy()), np.float64(loss.item()), round(float(loss), 3), copy.copy(out.detach())
    )
    step(s, loss)


@program()
def constructors_before_anything_is_real(s: Session) -> None:
    s.saw(torch.tensor([s.model(s.x).sum().detach(), 1.0]))
    s.saw(nn.Parameter(s.model(s.x).detach()).requires_grad)
    s.saw(torch.tensor(s.model(s.x).detach()))
    s.saw(torch.as_tensor(s.model(s.x).detach()), torch.asarray(s.model(s.x).detach()))
    s.saw(copy.copy(s.model(s.x).detach()), torch.Tensor(s.model(s.x).detach().float()))
    s.saw(np.asarray(s.model(s.x).detach()) * np.ones(3), np.ones(3) * s.model(s.x).detach().numpy())
    s.saw(nn.ParameterList([nn.Parameter(s.model(s.x).detach())])[0])


@program()
def inference_metrics(s: Session) -> None:
    out = s.model(s.x)
    loss = F.cross_entropy(out, s.y)
    with torch.inference_mode():
        hits = (out.argmax(1) == s.y).sum()
        probabilities = out.softmax(1)
    loss.backward()
    s.saw(hits.item(), probabilities.clone())
    s.update()


@program()
def checkpointed_loss(s: Session) -> None:
    from torch.utils.checkpoint import checkpoint

    out = s.model(s.x)
    step(s, checkpoint(lambda a: (s.head(a).tanh() ** 2).mean(), out, use_reentrant=False))


@program()
def reentrant_checkpoint(s: Session) -> None:
    from torch.utils.checkpoint import checkpoint

    out = s.model(s.x)
    step(s, checkpoint(lambda a: (s.head(a).tanh() ** 2).mean(), out, use_reentrant=True))


@program()
def saved_on_cpu(s: Session) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = F.cross_entropy(s.model(s.x), s.y)
    step(s, loss)


@program()
def read_under_saved_tensor_hooks(s: Session) -> None:
    loss = F.cross_entropy(s.model(s.x), s.y)
    with torch.autograd.graph.save_on_cpu():
        value = (loss * loss).item()
    step(s, loss * (1 + value))


@program()
def loss_in_checkpoint(s: Session) -> None:
    def head(out: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(out, s.y)
        return loss * (1 + loss.item())

    step(s, torch.utils.checkpoint.checkpoint(head, s.model(s.x), use_reentrant=False))


@program()
def anomaly(s: Session) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        step(s, F.cross_entropy(s.model(s.x), s.y))


@program()
def comparisons_and_containers(s: Session) -> None:
    a, b = (F.cross_entropy(s.model(x), s.y) for x in (s.x, s.x2))
    best = min([a, b])
    worst = max(a, b)
    s.saw(a < b, bool(a == b), sorted([a.item(), b.item()]), [a, b].index(a), a in [a])
    step(s, best + 2 * worst)


@program()
def einsum_and_bmm(s: Session) -> None:
    out = s.model(s.x)
    step(s, torch.einsum("bi,bj->ij", out, s.t).pow(2).mean() + torch.bmm(out[:, None], s.t[:, :, None]).mean())


@program()
def out_of_no_grad(s: Session) -> None:
    with torch.no_grad():
        target = s.model(s.x2)
    s.saw(target.requires_grad)
    step(s, F.mse_loss(s.model(s.x), target))


@program()
def module_losses(s: Session) -> None:
    out = s.model(s.x)
    criteria = [nn.SmoothL1Loss(), nn.HuberLoss(), nn.L1Loss(), nn.MSELoss()]
    loss = sum(one(out, s.t) for one in criteria)
    loss = loss + nn.CosineEmbeddingLoss()(out, s.t, torch.ones(7)) + nn.TripletMarginLoss()(out, s.t, s.t + 1)
    loss = loss + nn.MultiMarginLoss()(out, s.y) + nn.GaussianNLLLoss()(out, s.t, torch.ones(7, 3).double())
    loss = loss + nn.KLDivLoss(reduction="batchmean")(out.log_softmax(1), s.t.softmax(1)) + nn.NLLLoss()(out, s.y)
    step(s, loss + nn.BCEWithLogitsLoss()(out, (s.t > 0).double()) + nn.PoissonNLLLoss()(out, s.t.abs()))


@program()
def ctc(s: Session) -> None:
    logp = s.model(s.x)[:, None].expand(7, 2, 3).log_softmax(-1)
    step(s, F.ctc_loss(logp, torch.tensor([[1, 2], [2, 1]]), torch.tensor([7, 7]), torch.tensor([2, 2])))


@program()
def norm_layer_outside(s: Session) -> None:
    if not hasattr(s, "norm"):
        s.norm = nn.BatchNorm1d(3, dtype=torch.float64)
    out = s.norm(s.model(s.x))
    s.saw(s.norm.running_mean.clone())
    step(s, F.cross_entropy(out, s.y))


@program()
def boolean_selection(s: Session) -> None:
    out = s.model(s.x)
    picked = out[s.y == 1]
    s.saw(tuple(picked.shape))
    chosen = out[out.argmax(1) == s.y]
    step(s, picked.sum() + chosen.sum())


@program()
def data_and_detach_in_place(s: Session) -> None:
    out = s.model(s.x)
    s.saw(out.data.sum())
    other = s.model(s.x2).detach_()
    s.saw(other.requires_grad, other.sum())
    step(s, F.cross_entropy(out, s.y))


@program(models.Recurrent)
def losses_of_calls_that_carry_a_state(s: Session) -> None:
    state: Any = s.x
    total: Any = 0
    for _ in range(3):
        out, state = s.model(state)
        total += F.nll_loss(out, s.y)
    total.backward()
    s.saw(total)
    s.update()


@program()
def written_after_something_was_made_of_it(s: Session) -> None:
    out = s.model(s.x)
    with torch.no_grad():
        scaled = out * 3.0
    product = scaled.t() @ scaled
    loss = out.sum()
    scaled.add_(0.5)
    loss.backward()
    s.saw(product, scaled)
    s.update()
