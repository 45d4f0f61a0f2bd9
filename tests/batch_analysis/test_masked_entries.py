"""Masked entries split where every sample has equally many, never where the order crosses samples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from gemini.batch_analysis.batch_kinds import SplittingError
from gemini.batch_analysis.numeric_check import check_splitting
from tests.batch_analysis.recorder import Step
from tests.batch_analysis.test_losses import N, split_equals
from tests.batch_analysis.test_model_losses import own

D, T, P, TOKEN = 4, 6, 3, 9


class Pictures(nn.Module):
    """Pictures take the places of a token in a text; `way` puts them there."""

    def __init__(self, way) -> None:
        super().__init__()
        self.words, self.see, self.head = nn.Embedding(10, D), nn.Linear(5, D), nn.Linear(D, D)
        self.way = way

    def forward(self, ids, pictures):
        seen, words = torch.tanh(self.see(pictures)), self.words(ids)
        mask = (ids == TOKEN).unsqueeze(-1).expand_as(words)
        return torch.tanh(self.head(self.way(words, mask, seen))).square().mean()


WAYS = {
    "as in transformers": lambda w, m, s: w.masked_scatter(m, s.reshape(-1, D).to(w.dtype)),
    "written": lambda w, m, s: written(w, m[..., 0], s.reshape(-1, D)),
    "one row for all": lambda w, m, s: written(w, m[..., 0], w.new_ones(D)) + s.mean(1, keepdim=True),
    "selected and back": lambda w, m, s: torch.cat([w, w[m].view(-1, P, D) + s], 1),
    "a mask of another sample": lambda w, m, s: w.masked_scatter(m.flip(0), s),
    "a mask of the last": lambda w, m, s: w[m.roll(1, 0)].view(-1, P, D) * s,
}
CROSSED = {
    "written in another order": lambda w, m, s: written(w, m[..., 0], s.transpose(0, 1).reshape(-1, D)),
    "a mean written": lambda w, m, s: written(w, m[..., 0], s.mean((0, 1)).expand(int(m[..., 0].sum()), D)),
    "the first written": lambda w, m, s: written(w, m[..., 0], s[0, 0]),
    "sources in another order": lambda w, m, s: w.masked_scatter(m, s.flip(0)),
    "sources by position first": lambda w, m, s: w.masked_scatter(m, s.transpose(0, 1)),
    "places by position first": lambda w, m, s: w.transpose(0, 1).masked_scatter(m.transpose(0, 1), s).transpose(0, 1),
    "sources shifted": lambda w, m, s: w.masked_scatter(m, s.reshape(-1, D).roll(1, 0)),
    "a mean as source": lambda w, m, s: w.masked_scatter(m, s.mean(0, keepdim=True).expand_as(s)),
    "a mask by results": lambda w, m, s: w.masked_scatter((w > 0.1) & m, s),
    "softmax over the selected": lambda w, m, s: w[m].softmax(0).view(-1, P, D) * s,
}


def written(words, mask, rows):
    made = words.clone()
    made[mask] = rows
    return made


def batch(places=None, samples=N):
    torch.manual_seed(0)
    ids = torch.randint(0, 8, (samples, T))
    for at in range(samples):
        ids[at, (places or (lambda at: torch.randperm(T)[:P]))(at)] = TOKEN
    return ids, torch.randn(samples, P, 5, dtype=torch.float64)


@pytest.mark.parametrize("name", WAYS)
def test_pictures_in_their_places(name):
    step = Step(Pictures(WAYS[name]).double(), batch(), own)
    split_equals(step)
    assert bool(step.splitting.conditions) == (name != "one row for all")
    assert check_splitting(step.forms, step.tape, step.root, step.splitting, step.inputs, {}) == ""


@pytest.mark.parametrize("name", CROSSED)
def test_orders_that_cross_samples_are_refused(name):
    assert Step(Pictures(CROSSED[name]).double(), batch(), own).reason


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(st.integers(0, T), min_size=4, max_size=4))
def test_other_numbers_of_places_are_not_split(counts):
    step = Step(Pictures(WAYS["as in transformers"]).double(), batch(samples=4), own)
    assert step.reason == ""
    ids, pictures = batch(lambda at: torch.randperm(T)[: counts[at]], samples=4)
    step.bound.update(ids=ids, pictures=pictures)
    step.inputs = (ids, pictures)
    if counts == [P] * 4 or not any(counts):
        step.splitting.weights(_known(step), [2, 2])
    else:
        with pytest.raises(SplittingError, match="a mask selects"):
            step.splitting.weights(_known(step), [2, 2])


def _known(step):
    from gemini.batch_analysis.precompute import Precomputed

    return Precomputed(step.graph, step.bound, step.tape)


class Scores(nn.Module):
    """(n, t, d) → (n, t, d)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, x):
        return torch.tanh(self.fc(x))


def test_a_loss_of_selected_entries():
    torch.manual_seed(0)
    mask = torch.stack([torch.randperm(T) < P for _ in range(N)])
    y = torch.randint(0, D, (N, T))
    x = torch.randn(N, T, D, dtype=torch.float64)
    split_equals(Step(Scores().double(), (x,), lambda o: F.cross_entropy(o[mask], y[mask])))
    uneven = mask.clone()
    uneven[0] = False
    step = Step(Scores().double(), (x,), lambda o: o[uneven].mean())
    assert "differs from sample to sample" in step.reason
