"""Losses and models that only seem to split: where a proof succeeds, the numbers agree."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemini.batch_analysis.batch_kinds import SplittingError
from gemini.batch_analysis.numeric_check import check_splitting
from gemini.ir.interpreter import GuardBroken
from tests.batch_analysis.recorder import Step
from tests.batch_analysis.test_losses import Y_IGNORED, C, N, Y, positive, rows, targets

PIECES = ([3, 2, 2], [1] * 7, [6, 1], [1, 6])


def never_wrong(step) -> str:
    """'' where it is proven and right; else the reason it gives."""
    if step.reason:
        return step.reason
    for sizes in PIECES:
        try:
            assert step.difference(list(sizes)) == "", sizes
        except (SplittingError, GuardBroken) as error:  # a step that is not what its proof was about is not split
            return str(error)
    return ""


SOME = torch.tensor([1.0, 0, 0, 1, 0, 0, 0]).double()
HEAVY = torch.tensor([0.0, 1, 0, 2, 0]).double()
FEW = torch.tensor([0, 0, 2, 1, 0, 2, 2])  # classes of weight 0 in most micro-batches

# Samples see each other: never to be split.
COUPLED = {
    "in-batch negatives": lambda o: F.cross_entropy(F.normalize(o) @ F.normalize(o).T / 0.1, torch.arange(N)),
    "two views": lambda o: F.cross_entropy(o @ o.detach().T, torch.arange(N)),
    "supervised contrastive": lambda o: -((o @ o.T).log_softmax(-1) * (Y[:, None] == Y[None])).sum() / N,
    "decorrelation": lambda o: (o.T @ o / N).tril(-1).square().sum(),
    "variance hinge": lambda o: F.relu(1 - o.std(0)).mean(),
    "gram": lambda o: torch.einsum("ic,jc->ij", o, o).square().sum(),
    "neighbours": lambda o: (o[1:] - o[:-1]).square().mean(),
    "rolled": lambda o: F.triplet_margin_loss(o, o.roll(1, 0), -o),
    "distances": lambda o: torch.cdist(o, o).mean(),
    "pdist": lambda o: F.pdist(o).sum(),
    "softmax over all": lambda o: (o.flatten().softmax(0) * positive(N * C)).sum(),
    "hardest": lambda o: F.cross_entropy(o, Y, reduction="none").topk(3).values.mean(),
    "worst": lambda o: F.cross_entropy(o, Y, reduction="none").max(),
    "quantile": lambda o: o.flatten().quantile(0.3),
    "sorted": lambda o: (o.sort(0).values * positive(N, C)).sum(),
    "cumulative": lambda o: o.cumsum(0).square().mean(),
    "dice of the batch": lambda o: 1 - 2 * (o.sigmoid() * positive(N, C)).sum() / (o.sigmoid() + positive(N, C)).sum(),
    "self-weighted": lambda o: (o.square() * o.detach().abs()).sum() / o.detach().abs().sum(),
    "scaled to one": lambda o: (o / o.detach().amax()).square().sum(),
    "a root of the mean": lambda o: F.mse_loss(o, positive(N, C)).sqrt(),
    "log of a mean": lambda o: -o.softmax(-1).mean(0).log().sum(),
    "entropy of the mean": lambda o: (o.softmax(-1).mean(0) * o.softmax(-1).mean(0)).sum(),
    "product of means": lambda o: o.mean() * F.cross_entropy(o, Y),
    "focal of the mean": lambda o: (1 - torch.exp(-F.cross_entropy(o, Y))) ** 2 * F.cross_entropy(o, Y),
    "clipped mean": lambda o: F.cross_entropy(o, Y).clamp(max=1.0),
    "larger of two": lambda o: torch.maximum(o.mean(), o.square().mean()),
    "absolute sum": lambda o: o.sum().abs(),
    "a kernel": lambda o: torch.exp(-(o[:, None] - o[None]).square().sum(-1)).mean(),
    "one for all": lambda o: F.mse_loss(o, o.mean(0, keepdim=True).expand(N, C)),
    "reversed targets": lambda o: F.mse_loss(o, o.flip(0).detach()),
    "covariance": lambda o: torch.cov(o.T).square().sum(),
    "correlated": lambda o: torch.corrcoef(o.T).square().sum(),
    "normalized over samples": lambda o: F.normalize(o, dim=0).square().square().sum(),
    "a determinant": lambda o: torch.logdet(o.T @ o + torch.eye(C, dtype=o.dtype)),
    "transposed classes": lambda o: F.cross_entropy(o.T, targets(C).clamp(max=N - 1)),
    "layer norm over samples": lambda o: F.layer_norm(o.T, (N,)).square().square().sum(),
    "mixed up": lambda o: (o * o[torch.tensor([1, 0, 3, 2, 5, 4, 6])]).sum(),
    "mixup": lambda o: F.mse_loss(0.7 * o + 0.3 * o[torch.arange(N - 1, -1, -1)], positive(N, C)),
    "pairs on a diagonal": lambda o: (o @ positive(N, C).T).diagonal().square().sum(),
    "an odd reshape": lambda o: o.reshape(C, N).softmax(0).square().sum(),
    "a view across": lambda o: o.reshape(-1)[: N * C // 2].square().sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", COUPLED)
def test_samples_that_see_each_other_are_not_split(name):
    assert Step(*rows(), COUPLED[name]).reason


# Denominators, counts and numbers that vanish or differ in a micro-batch: split rightly, or not at all.
ODD = {
    "no weight in a part": lambda o: F.cross_entropy(o, FEW, weight=HEAVY),
    "no weight, smoothed": lambda o: F.cross_entropy(o, FEW, weight=HEAVY, label_smoothing=0.3),
    "no weight, nll": lambda o: F.nll_loss(o.log_softmax(-1), FEW, HEAVY),
    "no weight but ignored": lambda o: F.cross_entropy(o, FEW, weight=HEAVY, ignore_index=1),
    "few counted": lambda o: (o.square().sum(-1) * SOME).sum() / SOME.sum(),
    "few counted, clamped": lambda o: (o.square().sum(-1) * SOME).sum() / SOME.sum().clamp(min=3),
    "count of targets": lambda o: F.cross_entropy(o, Y_IGNORED, reduction="sum") / (Y_IGNORED != -100).sum(),
    "a plain count": lambda o: F.cross_entropy(o, Y_IGNORED, reduction="sum") / int((Y_IGNORED != -100).sum()),
    "over the batch size": lambda o: o.square().sum() / len(o),
    "times the batch size": lambda o: o.square().mean() * o.shape[0],
    "root of the batch size": lambda o: o.square().sum() / o.shape[0] ** 0.5,
    "over n - 1": lambda o: o.square().sum() / (o.shape[0] - 1),
    "only for large batches": lambda o: o.sum() if o.shape[0] > 4 else o.square().sum(),
    "mean and sum": lambda o: o.mean() + o.sum() * 0.1 - F.cross_entropy(o, Y_IGNORED),
    "constant in a mean": lambda o: (o.mean() + 3.0) / 2 + (o.sum() + 1.0) / 3,
    "weights by sample": lambda o: (F.cross_entropy(o, Y, reduction="none") * positive(N)).sum() / positive(N).sum(),
    "normal weights": lambda o: (F.cross_entropy(o, Y, reduction="none") * positive(N).softmax(0)).sum(),
    "rank of a sample": lambda o: (o.sum(-1) * torch.arange(N).double()).mean(),
    "advantages": lambda o: (o[:, 0] * ((positive(N) - positive(N).mean()) / positive(N).std())).mean(),
    "detached mean as baseline": lambda o: ((positive(N) - positive(N).mean()) * o.log_softmax(-1)[:, 0]).sum(),
    "nan where empty": lambda o: torch.nan_to_num((o * SOME[:, None]).sum() / SOME.sum()),
    "none counted": lambda o: (o.sum(-1) * (SOME * 0)).sum() / (SOME * 0).sum().clamp(min=1),
    "mean of mean": lambda o: o.mean(0).mean() + o.mean(1).mean(),
    "batchmean": lambda o: F.kl_div(o.log_softmax(-1), positive(N, C), reduction="batchmean", log_target=False),
    "batchmean of a transpose": lambda o: F.kl_div(o.T, positive(C, N), reduction="batchmean"),
    "one-sample operand": lambda o: F.mse_loss(o, positive(1, C).expand(N, C)),
    "square operand": lambda o: (o @ positive(C, C)).mean(),
    "diagonal of a product": lambda o: torch.einsum("nc,nc->n", o, positive(N, C)).tanh().sum(),
    "counted by class": lambda o: torch.zeros(C).double().index_add(0, Y, o.sum(-1)).square().sum(),
    "added by class": lambda o: torch.zeros(C).double().index_add(0, Y, o.sum(-1)).sum(),
    "scattered": lambda o: torch.zeros(N, C).double().scatter(1, Y[:, None], o[:, :1]).square().mean(),
    "histogram": lambda o: (torch.bincount(Y, minlength=C).double() * o.mean(0)).sum(),
    "class balance": lambda o: F.cross_entropy(o, Y, weight=1 / torch.bincount(Y, minlength=C).clamp(min=1).double()),
    "masked select": lambda o: o.masked_select(positive(N, C) > 0.6).mean(),
    "selected rows": lambda o: o[SOME.bool()].square().mean(),
    "nonzero rows": lambda o: o[SOME.nonzero()[:, 0]].square().sum(),
    "masked scatter": lambda o: torch.zeros(N, C).double().masked_scatter(positive(N, C) > 0.6, o).square().sum(),
    "where": lambda o: torch.where(SOME.bool()[:, None], o, o.detach()).square().mean(),
    "a power": lambda o: o.square().mean() ** 1,
    "two backward parts": lambda o: (o.mean() * 2 + o.sum() * 0) / 3,
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_losses_are_split_rightly_or_not_at_all(name):
    never_wrong(Step(*rows(), ODD[name]))


def own(outputs):
    return outputs * 1.0 if isinstance(outputs, torch.Tensor) else outputs[0] * 1.0


class Way(nn.Module):
    """(n, 3, 4) through a layer and one way on."""

    def __init__(self, way) -> None:
        super().__init__()
        self.fc, self.way = nn.Linear(4, 4), way
        self.register_buffer("table", torch.arange(48.0).view(12, 4) / 48)

    def forward(self, x, mask):
        return self.way(self, torch.tanh(self.fc(x)), mask)


# x (n, 3, 4), mask (n, 3) of 0 and 1.
WAYS = {
    "attention across": lambda m, x, k: F.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3).mean(),
    "attention of all tokens": lambda m, x, k: F.scaled_dot_product_attention(*[x.reshape(1, -1, 4)] * 3).mean(),
    "pooled by the batch": lambda m, x, k: (x.mean(0) @ x.mean(0).T).sum(),
    "masked mean": lambda m, x, k: (x.square().sum(-1) * k).sum() / k.sum(),
    "masked mean of tokens": lambda m, x, k: ((x * k[..., None]).sum(1) / k.sum(1)[:, None].clamp(1)).square().mean(),
    "mean of nothing": lambda m, x, k: (x.square().sum(-1) * k * 0).sum() / (k * 0).sum().clamp(min=1e-6),
    "longest": lambda m, x, k: x[:, : int(k.sum(1).max())].square().mean(),
    "any": lambda m, x, k: x.square().mean() if k.any() else x.sum(),
    "all": lambda m, x, k: x.square().mean() if k.all() else x.sum(),
    "selected": lambda m, x, k: x[k.bool()].square().mean(),
    "selected sum": lambda m, x, k: x[k.bool()].square().sum(),
    "written by a mask": lambda m, x, k: written(x, k).square().mean(),
    "filled from another": lambda m, x, k: x.masked_scatter(cells(x, k), x.flip(0)).square().mean(),
    "filled in order": lambda m, x, k: x.masked_scatter(cells(x, k), x.tanh()).square().mean(),
    "cumulative count": lambda m, x, k: (x.sum(-1) * k.flatten().cumsum(0).view(k.shape)).mean(),
    "index of the batch": lambda m, x, k: x.flatten(0, 1)[torch.arange(x.shape[0]) * 3].square().mean(),
    "first rows": lambda m, x, k: x.flatten(0, 1)[: x.shape[0]].square().mean(),
    "strided": lambda m, x, k: x.contiguous().as_strided((x.shape[0], 2, 4), (12, 4, 1)).square().mean(),
    "strided across": lambda m, x, k: x.contiguous().as_strided((x.shape[0], 4), (4, 1)).square().mean(),
    "odd view": lambda m, x, k: x.reshape(3, -1).softmax(-1).square().sum(),
    "groups": lambda m, x, k: F.group_norm(x.transpose(0, 1), 1).square().square().mean(),
    "one row for all": lambda m, x, k: (x - x[:1]).square().mean(),
    "sorted tokens": lambda m, x, k: x.flatten(0, 1)[x[..., 0].flatten().argsort()].cumsum(0).mean(),
    "unique": lambda m, x, k: x.square().sum() / k.unique().numel(),
    "by the number": lambda m, x, k: x.square().mean() * (2 if x.shape[0] % 2 else 1),
    "rows of a table": lambda m, x, k: (x[:, 0] + m.table[: x.shape[0]]).square().mean(),
    "numbered rows": lambda m, x, k: (x[:, 0] + m.table[torch.arange(x.shape[0])]).square().mean(),
    "repeat by mask": lambda m, x, k: x.flatten(0, 1).repeat_interleave(k.long().flatten(), 0).square().mean(),
    "segments": lambda m, x, k: segments(x, 0).square().mean(),
    "shifted segments": lambda m, x, k: segments(x, 1).square().mean(),
    "padded batch": lambda m, x, k: F.pad(x, (0, 0, 0, 0, 1, 0))[:-1].mul(x).mean(),
    "triangle": lambda m, x, k: (x[:, 0] @ x[:, 0].T).tril().sum(),
    "kept mean": lambda m, x, k: (x / x.detach().mean()).square().mean(),
    "targets written under a view": lambda m, x, k: late(x, k, view=True),
    "targets written": lambda m, x, k: late(x, k, view=False),
    "a count before a write": lambda m, x, k: counted(x, k),
    "targets written after": lambda m, x, k: twice(x, k, 0),
    "targets written in between": lambda m, x, k: twice(x, k, 1),
    "targets written by results": lambda m, x, k: twice(x, k, 2),
    "targets of a write": lambda m, x, k: refilled(x, k),
    "an input written": lambda m, x, k: viewed(x, k),
    "count nonzero": lambda m, x, k: x.square().sum() / torch.count_nonzero(k),
}  # fmt: skip


RIGHT = (
    "targets of a write",
    "targets written",
    "targets written under a view",
    "targets written after",
    "targets written in between",
)
WRONG = ("targets written by results", "an input written", "attention across", "filled from another", "one row for all")


def cells(x, mask):
    return mask.bool()[..., None].expand_as(x)


def segments(x, shift):
    owner = (torch.arange(x.shape[0]).repeat_interleave(3) + shift).clamp(max=x.shape[0] - 1)
    return torch.zeros(x.shape[0], 4).to(x).index_add(0, owner, x.flatten(0, 1))


def late(x, mask, view):
    target = mask.long() + 1
    flat = target.view(-1)
    target.masked_fill_(mask > 0, -100)
    return F.cross_entropy(x.reshape(-1, 4), flat if view else target.reshape(-1), ignore_index=-100)


def twice(x, mask, way):
    target, scores = mask.long() + 1, x.reshape(-1, 4)
    flat = target.view(-1)
    target[:, 0] = -100
    first = F.cross_entropy(scores, flat.clone())
    if way == 2:
        target[x[..., 0] > 0] = -100
    elif way == 1:
        target.masked_fill_(mask > 0, -100)
    second = F.cross_entropy(scores, flat.clone()) if way else 0.0
    target[:, 1] = 0
    return first + second


def refilled(x, mask):
    target = mask.long() + 1
    target.masked_fill_(mask > 0, -100)
    target[:, 0] = -100
    return F.cross_entropy(x.transpose(1, 2), target)


def viewed(x, mask):
    flat = mask.view(-1)
    flat[::2] = 0
    return (x.square().sum(-1) * mask).sum() / mask.sum().clamp(min=1)


def counted(x, mask):
    held = mask.clone()
    row = held[:, 0]
    held[:, 0] = 1 - held[:, 0]
    return (x.square().sum(-1)[:, 0] * row).sum() / row.sum()


def written(x, mask):
    made = x.clone()
    made[mask.bool()] = x.flip(0)[mask.bool()]
    return made


@pytest.mark.parametrize("name", WAYS)
def test_ways_through_a_model_are_split_rightly_or_not_at_all(name):
    torch.manual_seed(4)
    x = torch.randn(N, 3, 4, dtype=torch.float64)
    mask = (torch.rand(N, 3) > 0.4).double()
    try:
        WAYS[name](Way(None).double(), x, mask)
    except (RuntimeError, IndexError) as error:
        pytest.skip(str(error))
    step = Step(Way(WAYS[name]).double(), (x, mask), own)
    assert bool(step.reason) is (name not in RIGHT) or name not in (*RIGHT, *WRONG)
    if not never_wrong(step):
        assert check_splitting(step.forms, step.tape, step.root, step.splitting, step.inputs, {}) == ""


class Large(nn.Module):
    """Twice as much for more than six samples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, C)

    def forward(self, x):
        x = torch.tanh(self.fc(x))
        return x * 2 if x.shape[0] > 6 else x


def test_a_branch_that_only_the_whole_batch_takes():
    from gemini.batch_analysis.graph_analysis import prove_graph
    from gemini.batch_analysis.loss_analysis import prove
    from gemini.batch_analysis.loss_tape import Meta, Tape
    from gemini.capture import capture

    x = torch.randn(2, 4)  # one micro-batch
    graph = capture(Large(), (x,))
    forms = prove_graph(graph, (x,))
    assert forms.reason == ""
    for samples, refused in ((6, False), (7, True), (8, True)):
        tape = Tape(1, [Meta((samples, C), torch.float32, torch.device("cpu"), True)])
        assert ("number of samples" in prove(forms, tape, 0, samples).reason) is refused


class Padded(nn.Module):
    """A loss inside, over targets of which some do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(4, C), nn.Dropout(0.5)

    def forward(self, x, y):
        scores = self.drop(self.fc(x))
        shown = (y != -100).expand(scores.shape[0], -1)  # asks for the size of what is drawn
        return F.cross_entropy(scores.flatten(0, 1), y.flatten()) * (2.0 if shown.any() else 1.0)


def test_a_mean_of_the_model_that_the_program_divides():
    torch.manual_seed(0)
    x, y = torch.randn(N, 3, 4, dtype=torch.float64), targets(N, 3, ignored=8)
    step = Step(Padded().double().eval(), (x, y), lambda o: o / 4)
    assert never_wrong(step) == ""
    assert check_splitting(step.forms, step.tape, step.root, step.splitting, step.inputs, {}) == ""


def test_nothing_is_drawn_before_a_step():
    from gemini.batch_analysis.precompute import Precomputed

    torch.manual_seed(0)
    x, y = torch.randn(N, 3, 4, dtype=torch.float64), targets(N, 3, ignored=8)
    step = Step(Padded().double(), (x, y), lambda o: o / 4)
    assert step.reason == ""
    assert step.splitting.needs()
    before = torch.get_rng_state()
    step.splitting.weights(Precomputed(step.graph, step.bound, step.tape), [3, 4])
    assert torch.equal(before, torch.get_rng_state())
