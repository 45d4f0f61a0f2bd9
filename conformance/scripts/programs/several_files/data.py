"""Sequences of numbers, labelled by their largest run."""

import torch
from torch.utils.data import DataLoader, TensorDataset


def _make(count, generator):
    x = torch.randint(0, 12, (count, 16), generator=generator)
    y = (x.float().mean(1) > 5.5).long() + (x[:, 0] > 8).long()
    return TensorDataset(x, y)


def make_loaders(settings):
    generator = torch.Generator().manual_seed(settings.seed)
    train = DataLoader(_make(180, generator), batch_size=20, shuffle=True, generator=generator)
    return train, DataLoader(_make(60, generator), batch_size=30)
