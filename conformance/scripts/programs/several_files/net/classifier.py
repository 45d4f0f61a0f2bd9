"""The whole network."""

import torch
from torch import nn

from .blocks import Block


class Classifier(nn.Module):
    def __init__(self, width, depth=3, classes=3):
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.position = nn.Parameter(torch.zeros(16, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def build_model(settings):
    return Classifier(settings.width)
