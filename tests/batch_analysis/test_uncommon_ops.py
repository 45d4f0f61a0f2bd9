"""Uncommon loss and layout ops are followed where they keep samples apart and refused otherwise."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from gemini.batch_analysis.batch_kinds import Opaque, Shard
from gemini.batch_analysis.graph_analysis import prove_graph
from gemini.capture import capture
from tests.batch_analysis.recorder import Step
from tests.batch_analysis.test_losses import N, split_equals
from tests.batch_analysis.test_model_losses import batch, own

D = 6


class Totalled(nn.Module):
    """Losses of two heads with different targets left out, added up in a total that began as 0."""

    def __init__(self, peek: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.peek = nn.Linear(D, 4), nn.Linear(D, 3), peek

    def forward(self, x, y, z):
        total = torch.full((), 0.0, dtype=x.dtype)
        before = total.view(1) if self.peek else None
        total += F.cross_entropy(self.one(x), y, ignore_index=1)
        total += F.cross_entropy(self.two(x), z, ignore_index=2)
        return total if before is None else total + before.sum()


def targets():
    torch.manual_seed(2)
    return torch.randint(0, 4, (N,)), torch.randint(0, 3, (N,))


def test_a_total_that_losses_are_added_to():
    split_equals(Step(Totalled().double(), (batch(D), *targets()), own))


def test_a_view_of_a_total_made_before_shows_what_is_added():
    split_equals(Step(Totalled(peek=True).double(), (batch(D), *targets()), own))


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        made = torch.softmax(x, dim)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx, gradient):
        (made,) = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, made, ctx.dim, made.dtype), None


class Softened(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc, self.dim = nn.Linear(D, D), dim

    def forward(self, x):
        return Softmax.apply(self.fc(x), self.dim).square().mean()


def test_the_backward_of_a_softmax_in_a_custom_function():
    split_equals(Step(Softened(-1).double(), (batch(4, D),), own))
    assert Step(Softened(0).double(), (batch(4, D),), own).splitting.reason


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, 1)

    def forward(self, x):
        return self.fc(x).squeeze()


def test_squeezed_samples_are_followed_where_a_micro_batch_has_two():
    graph = capture(Squeezed(), (torch.randn(4, D),))
    (output,) = graph.outputs()
    assert isinstance(prove_graph(graph).kind(output), Opaque)
    assert prove_graph(graph, least=2).kind(output) == Shard(0)


class OddlySized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, x):
        longer = torch.cat([x, x[:1]])
        return self.fc(longer).view(longer.shape).square().sum()


def test_a_size_that_does_not_count_samples_is_refused():
    step = Step(OddlySized().double(), (batch(D),), own)
    assert step.splitting.reason


def bounds(hidden, mask):
    """Kept whole, for its random numbers; looks at contents of one and at the size of the other."""
    low = np.random.rand() * 0
    return torch.full(hidden.shape[:1], low) + mask.sum()


def contents(hidden, mask):
    return torch.full(hidden.shape[:1], np.random.rand() * 0) + hidden.detach().sum() + mask.sum()


class Bounded(nn.Module):
    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.fc, self.looks = nn.Linear(D, D), looks

    def forward(self, x, mask):
        h = self.fc(x)
        return h * (contents(h, mask) if self.looks else bounds(h, mask)).unsqueeze(-1)


def test_functions_are_known_ahead_where_they_look_at_sizes_only():
    given = torch.randn(4, D), torch.rand(4, 3)
    for looks, kind in ((False, Shard), (True, Opaque)):
        graph = capture(Bounded(looks), given)
        (output,) = graph.outputs()
        assert isinstance(prove_graph(graph, given, {}).kind(output), kind)


class Cast(nn.Module):
    """Casts by `type`, which without an argument only tells the type."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(D, D), nn.Linear(D, D).double()

    def forward(self, x):
        h = self.one(x)
        if h.type() != "torch.FloatTensor":
            raise TypeError(h.type())
        return self.two(h.type(self.two.weight.dtype)).type("torch.FloatTensor").type(torch.float32)


def test_casts_by_type_are_followed():
    graph = capture(Cast(), (torch.randn(4, D),))
    (output,) = graph.outputs()
    assert not graph.blocks
    assert prove_graph(graph).kind(output) == Shard(0)


class Bags(nn.Module):
    def __init__(self, *, weighed: bool = True, **settings: bool) -> None:
        super().__init__()
        self.table, self.fc = nn.Parameter(torch.randn(10, D)), nn.Linear(D, 5)
        self.weighed, self.settings = weighed, settings

    def forward(self, x, index):
        weights = self.fc(x).softmax(-1) if self.weighed else None
        return (
            F.embedding_bag(index, self.table, mode="sum", per_sample_weights=weights, **self.settings).square().mean()
        )


def test_bags_of_rows_with_weights_of_each():
    index = torch.arange(N * 5).view(N, 5) % 10
    split_equals(Step(Bags().double(), (batch(D), index), own))
    split_equals(Step(Bags(weighed=False).double(), (batch(D), index), own))
    counted = Step(Bags(weighed=False, scale_grad_by_freq=True).double(), (batch(D), index), own)
    assert "how often" in counted.splitting.reason


class Turned(nn.Module):
    """A spatial transformer: places to look at, for each sample its own."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.head = nn.Linear(D, 6), nn.Linear(D, 4)

    def forward(self, x, image):
        grid = F.affine_grid(self.places(x).view(-1, 2, 3).tanh(), image.size(), align_corners=False)
        seen = F.grid_sample(image, grid, align_corners=False)
        return self.head(seen.flatten(2).mean(2))


def test_places_of_an_affine_map_are_those_of_its_samples():
    torch.manual_seed(3)
    images = torch.randn(N, D, 5, 4, dtype=torch.float64)
    split_equals(Step(Turned().double(), (batch(D), images), lambda o: o.square().mean()))


def test_an_affine_map_of_another_number_of_samples_is_refused():
    class Repeated(Turned):
        def forward(self, x, image):
            theta = self.places(x).view(-1, 2, 3).mean(0, keepdim=True).expand(3, 2, 3)
            return F.affine_grid(theta, (3, D, 5, 4), align_corners=False).mean() * self.head(x)

    torch.manual_seed(3)
    assert Step(Repeated().double(), (batch(D), torch.randn(N, D, 5, 4).double()), lambda o: o.square().mean()).reason
