"""A proven loss equals its micro-batches, for all options and batch layouts, in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemini.batch_analysis.batch_kinds import SplittingError
from gemini.batch_analysis.microbatch_weights import _is_without
from gemini.batch_analysis.numeric_check import check_splitting
from tests.batch_analysis.recorder import Step

N, C, T = 7, 5, 3
SIZES = ([7], [3, 2, 2], [1] * 7, [5, 2])


class Rows(nn.Module):
    """(n, 4) → (n, classes)."""

    def __init__(self, classes: int = C) -> None:
        super().__init__()
        self.fc = nn.Linear(4, classes)

    def forward(self, x):
        return torch.tanh(self.fc(x))


class Tokens(nn.Module):
    """(n, t, 4) → (n, t, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, C)

    def forward(self, x):
        return torch.tanh(self.fc(x)) * 2


def rows(classes=C):
    torch.manual_seed(0)
    return Rows(classes).double(), (torch.randn(N, 4, dtype=torch.float64),)


def tokens():
    torch.manual_seed(0)
    return Tokens().double(), (torch.randn(N, T, 4, dtype=torch.float64),)


def targets(*shape, ignored=0):
    torch.manual_seed(1)
    made = torch.randint(0, C, shape)
    made.view(-1)[:ignored] = -100
    return made


def positive(*shape):
    torch.manual_seed(2)
    return torch.rand(*shape, dtype=torch.float64) + 0.1


def split_equals(step, sizes=SIZES):
    assert step.reason == ""
    for one in sizes:
        assert step.difference(list(one)) == ""


def counted(o, *, late):
    """A mean, and how many were right in percent, which is written in place."""
    loss = F.cross_entropy(o, Y_IGNORED) if not late else None
    right = o.detach().argmax(1).eq(Y_IGNORED).double().sum(0, keepdim=True)
    right.mul_(100 / N)
    return F.cross_entropy(o, Y_IGNORED) if loss is None else loss


WEIGHT = positive(C)
Y, Y_IGNORED = targets(N), targets(N, ignored=4)
ROWS = {
    "cross_entropy": lambda o: F.cross_entropy(o, Y),
    "ignored": lambda o: F.cross_entropy(o, Y_IGNORED),
    "sum": lambda o: F.cross_entropy(o, Y_IGNORED, reduction="sum"),
    "none, mean": lambda o: F.cross_entropy(o, Y_IGNORED, reduction="none").mean(),
    "as it was called once, sum": lambda o: F.cross_entropy(o, Y_IGNORED, size_average=False),
    "as it was called once, mean": lambda o: F.mse_loss(o, positive(N, C), True),
    "as it was called once, none": lambda o: F.cross_entropy(o, Y, None, False, -100, False).sum() / 32,
    "what is right is counted in place": lambda o: counted(o, late=False),
    "what is right is counted in place before": lambda o: counted(o, late=True),
    "none, over 32": lambda o: F.cross_entropy(o, Y_IGNORED, reduction="none").sum() / 32,
    "weights": lambda o: F.cross_entropy(o, Y_IGNORED, weight=WEIGHT),
    "smoothing": lambda o: F.cross_entropy(o, Y_IGNORED, label_smoothing=0.1),
    "smoothing, weights": lambda o: F.cross_entropy(o, Y_IGNORED, weight=WEIGHT, label_smoothing=0.2),
    "smoothing, sum": lambda o: F.cross_entropy(o, Y_IGNORED, weight=WEIGHT, label_smoothing=0.2, reduction="sum"),
    "probabilities": lambda o: F.cross_entropy(o, positive(N, C).softmax(-1), weight=WEIGHT, label_smoothing=0.1),
    "nll": lambda o: F.nll_loss(F.log_softmax(o, -1), Y_IGNORED, WEIGHT),
    "module": lambda o: nn.CrossEntropyLoss(ignore_index=2)(o, Y),
    "mse": lambda o: F.mse_loss(o, positive(N, C)),
    "l1": lambda o: F.l1_loss(o, positive(N, C), reduction="sum"),
    "smooth_l1": lambda o: nn.SmoothL1Loss(beta=0.3)(o, positive(N, C)),
    "huber": lambda o: F.huber_loss(o, positive(N, C), "mean", 0.4),
    "bce": lambda o: F.binary_cross_entropy(torch.sigmoid(o), positive(N, C).clamp(max=1), weight=positive(N, 1)),
    "bce logits": lambda o: F.binary_cross_entropy_with_logits(o, positive(N, C), pos_weight=WEIGHT),
    "bce logits weight": lambda o: F.binary_cross_entropy_with_logits(o, positive(N, C), weight=positive(N, C)),
    "kl mean": lambda o: F.kl_div(F.log_softmax(o, -1), positive(N, C), reduction="mean"),
    "kl batchmean": lambda o: F.kl_div(F.log_softmax(o, -1), positive(N, C), reduction="batchmean"),
    "kl sum": lambda o: F.kl_div(F.log_softmax(o, -1), positive(N, C), reduction="sum"),
    "cosine": lambda o: F.cosine_embedding_loss(o, positive(N, C), torch.ones(N)),
    "margin": lambda o: F.margin_ranking_loss(o[:, 0], positive(N), torch.ones(N), margin=0.1),
    "hinge": lambda o: F.hinge_embedding_loss(o, torch.ones(N, C)),
    "soft margin": lambda o: F.soft_margin_loss(o, torch.ones(N, C), reduction="sum"),
    "multi margin": lambda o: F.multi_margin_loss(o, Y, weight=WEIGHT),
    "multilabel margin": lambda o: F.multilabel_margin_loss(o, targets(N, C)),
    "multilabel soft": lambda o: F.multilabel_soft_margin_loss(o, positive(N, C), weight=WEIGHT),
    "triplet": lambda o: F.triplet_margin_loss(o, positive(N, C), -positive(N, C), swap=True),
    "gaussian": lambda o: F.gaussian_nll_loss(o, positive(N, C), positive(N, C), True, 1e-6, "sum"),
    "gaussian mean": lambda o: F.gaussian_nll_loss(o, positive(N, C), positive(N, C)),
    "poisson": lambda o: F.poisson_nll_loss(o, positive(N, C)),
    "two": lambda o: F.cross_entropy(o, Y_IGNORED) + 0.3 * F.mse_loss(o, positive(N, C)),
    "two and a constant": lambda o: F.cross_entropy(o, Y_IGNORED) + F.mse_loss(o, positive(N, C)) + 2.0,
    "sum and a constant": lambda o: o.square().sum() + 2.0,
    "constant between": lambda o: F.cross_entropy(o, Y_IGNORED) + 2.0 + o.mean(),
    "from zero": lambda o: sum([o.sum(), o.mean(), F.cross_entropy(o, Y)]),
    "difference": lambda o: 3.0 - o.square().mean() / 2,
    "stacked": lambda o: torch.stack([o.sum(), o.mean(), F.cross_entropy(o, Y_IGNORED)]).mean(),
    "weighted stack": lambda o: (torch.stack([o.sum(), o.mean()]) * positive(2)).sum(),
    "mean of classes": lambda o: o.mean(0).sum(),
    "entropy": lambda o: -(o.softmax(-1) * o.log_softmax(-1)).sum(-1).mean(),
    "einsum": lambda o: torch.einsum("bc,bc->", o, positive(N, C)) / N,
    "matrix": lambda o: (o.T @ positive(N, C)).sum(),
    "masked": lambda o: (o * (positive(N, C) > 0.5)).sum() / 11,
    "where": lambda o: torch.where(positive(N, C) > 0.5, o, 0.0).sum(),
    "gathered": lambda o: -o.log_softmax(-1).gather(1, Y[:, None]).squeeze(1).mean(),
    "a write": lambda o: o.clone().masked_fill_(positive(N, C) > 0.5, 0.0).mean(),
    "accumulated": lambda o: torch.zeros((), dtype=o.dtype).add(o.sum()).add_(o.mean()),
    "viewed": lambda o: o.view(N * C).mean() + o.reshape(N, -1).sum(),
    "expanded": lambda o: (o[:, None].expand(N, 2, C) * positive(2, C)).mean(),
    "cast": lambda o: F.mse_loss(o, positive(N, C)).to(torch.float64, copy=True),
    "detached weights": lambda o: (o.detach().sigmoid() * o).sum(-1).mean(),
    "scaled": lambda o: F.cross_entropy(o, Y) * torch.tensor(1024.0),
    "picked by number": lambda o: -o.log_softmax(-1)[torch.arange(N), Y].mean(),
    "unread": lambda o: (o.std(0), o.sum())[1],
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_losses_of_rows(name):
    split_equals(Step(*rows(), ROWS[name]))


Y2, Y2_IGNORED = targets(N, T), targets(N, T, ignored=8)
TOKENS = {
    "flat": lambda o: F.cross_entropy(o.view(-1, C), Y2_IGNORED.view(-1)),
    "flat by number": lambda o: F.cross_entropy(o.reshape(N * T, C), Y2_IGNORED.view(-1)),
    "classes second": lambda o: F.cross_entropy(o.transpose(1, 2), Y2_IGNORED, weight=WEIGHT, label_smoothing=0.1),
    "shifted": lambda o: F.cross_entropy(o[:, :-1].reshape(-1, C), Y2_IGNORED[:, 1:].reshape(-1)),
    "time first": lambda o: F.cross_entropy(o.transpose(0, 1).reshape(-1, C), Y2.reshape(-1), reduction="sum"),
    "of the last": lambda o: F.cross_entropy(o[:, -1], Y),
    "averaged": lambda o: F.cross_entropy(o.mean(1), Y),
    "ctc": lambda o: F.ctc_loss(
        o.log_softmax(-1).transpose(0, 1), targets(N, 2).clamp(min=1), torch.full((N,), T), torch.full((N,), 2)
    ),
    "token by token": lambda o: F.cross_entropy(o.transpose(1, 2), Y2_IGNORED, reduction="none").sum(1).mean(),
    "flattened": lambda o: o.flatten().square().mean() + o.flatten(1).sum(),
    "max of a sample": lambda o: o.amax((1, 2)).mean() + o.max(-1).values.sum(),
    "sorted": lambda o: o.sort(dim=1).values[:, 0].sum() + o.topk(2).values.mean(),
    "cumulative": lambda o: o.cumsum(1).mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENS)
def test_losses_of_tokens(name):
    split_equals(Step(*tokens(), TOKENS[name]))


REFUSED = {
    "a maximum": lambda o: o.max(),
    "a variance": lambda o: o.var(0).sum(),
    "a norm": lambda o: o.norm(),
    "a product": lambda o: o.sum() * o.mean(),
    "a root": lambda o: o.square().sum().sqrt(),
    "an exponential": lambda o: F.cross_entropy(o, Y).exp(),
    "a quotient": lambda o: o.square().sum() / o.abs().sum(),
    "pairs": lambda o: F.cross_entropy(o @ o.T, torch.arange(N)),
    "pairs by broadcast": lambda o: (o[:, None] - o[None]).square().mean(),
    "a sample": lambda o: o[0].sum(),
    "some samples": lambda o: o[: N - 1].sum(),
    "another order": lambda o: (o * o.flip(0)).sum(),
    "softmax over samples": lambda o: (o.softmax(0) * positive(N, C)).sum(),
    "a median": lambda o: o.median(),
    "logsumexp": lambda o: o.logsumexp(0).sum(),
    "centred": lambda o: (o - o.mean(0)).square().sum(),
    "a mask": lambda o: o[positive(N, C) > 0.5].mean(),
    "shuffled": lambda o: o[torch.randperm(N)].square().sum(),
    "all squeezed": lambda o: o[:, :1].squeeze().sum(),
    "pseudo labels": lambda o: F.cross_entropy(o, o.argmax(-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_split_is_refused(name):
    step = Step(*rows(), REFUSED[name])
    assert step.reason.startswith("the loss: ")


def test_classes_as_many_as_samples():
    model, inputs = rows(N)
    weight = positive(N)
    split_equals(Step(model, inputs, lambda o: F.cross_entropy(o, torch.arange(N), weight=weight)))
    split_equals(Step(model, inputs, lambda o: (o * weight).mean()))
    split_equals(Step(model, inputs, lambda o: (o * weight[:, None]).mean()))
    split_equals(
        Step(model, inputs, lambda o: F.binary_cross_entropy_with_logits(o, torch.eye(N).double(), pos_weight=weight))
    )


def test_no_target_in_a_micro_batch_and_in_none():
    y = torch.full((N,), -100)
    y[-1] = 1
    split_equals(Step(*rows(), lambda o: F.cross_entropy(o, y)))
    split_equals(Step(*rows(), lambda o: F.cross_entropy(o, y, label_smoothing=0.1, weight=WEIGHT)))
    step = Step(*rows(), lambda o: F.cross_entropy(o, torch.full((N,), -100)))
    assert step.reason == ""
    assert torch.isnan(step.whole()[0])
    assert torch.isnan(step.split([3, 4])[0])


def test_parameters_in_the_loss_count_once():
    model, inputs = rows()
    decay = lambda: sum(p.square().sum() for p in model.parameters())
    split_equals(Step(model, inputs, lambda o: F.cross_entropy(o, Y_IGNORED) + 0.1 * decay()))
    split_equals(Step(model, inputs, lambda o: F.cross_entropy(o, Y) + o.square().mean() + 0.1 * decay()))
    split_equals(Step(model, inputs, lambda o: o.square().sum() + 0.1 * decay()))
    split_equals(Step(model, inputs, lambda o: F.mse_loss(o @ model.fc.weight, positive(N, 4))))


def test_a_loss_added_up_in_place():
    def added(o):
        total = o.new_zeros(())
        total += F.cross_entropy(o, Y_IGNORED)
        total += o.square().mean()
        return total * 2

    split_equals(Step(*rows(), added))


def test_numbers_of_samples_are_looked_at_in_every_step():
    step = Step(*rows(), ROWS["picked by number"])
    assert step.splitting.numbers
    (number,) = step.splitting.numbers
    step.tape.operands[number] = torch.arange(N).flip(0)
    with pytest.raises(SplittingError, match="does not hold the sample indices"):
        step.split([3, 4])


def test_numbers_are_compared_where_a_loss_goes_on_in_another_precision():
    projection = positive(C, 3).float()
    step = Step(*rows(), lambda o: (o.bfloat16().float() @ projection).pow(2).mean())
    assert step.reason == ""
    assert check_splitting(step.forms, step.tape, step.root, step.splitting, step.inputs, {}) == ""


@pytest.mark.parametrize("ignore", [-100, 0, 1, 2, 5, 9])
@pytest.mark.parametrize("targets", [[], [2, 1, 5, 1], [2, 2, 2, 2], [-100, -100, 3, 0]])
def test_a_number_that_targets_do_not_have(targets: list[int], ignore: int) -> None:
    assert _is_without(torch.tensor(targets, dtype=torch.int64), ignore) == (ignore not in targets)
